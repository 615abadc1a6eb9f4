/** The panel beside the timeline: its tabs, and which one is open. */

import type { App } from "./app.ts";
import { ComparePage } from "./compare_page.ts";
import { button, make } from "./dom.ts";
import { InstructionPage } from "./instruction_page.ts";
import { LayerPage } from "./layer_page.ts";
import { PathPage } from "./path_page.ts";
import { StatisticsPage } from "./statistics_page.ts";
import { SummaryPage } from "./summary_page.ts";
import { TracePage } from "./trace_page.ts";
import { WhatIfPage } from "./what_if_page.ts";

/** What a tab shows. It renders only while it is open. */
export interface Page {
  readonly name: string;
  readonly element: HTMLElement;
  render(): void;
}

/** Places of the tabs. */
const [SUMMARY, WHAT_IF, INSTRUCTION, STATISTICS, PATH, COMPARE] = [0, 1, 2, 3, 4, 5];

export class Panel {
  readonly element = make("aside", "panel");
  private readonly pages: readonly Page[];
  private readonly tabs: readonly HTMLButtonElement[];
  private open = 0;
  private timer = 0;

  constructor(app: App, openCompare: () => void) {
    this.pages = [
      new SummaryPage(app, () => this.show(WHAT_IF)),
      new WhatIfPage(app),
      new InstructionPage(app),
      new StatisticsPage(app),
      new PathPage(app),
      new ComparePage(app, openCompare),
      new TracePage(app),
      new LayerPage(app),
    ];
    this.tabs = this.pages.map((page, i) => {
      const tab = button(page.name, "", () => this.show(i), "tab");
      tab.id = `tab-${i}`;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", `panel-${i}`);
      page.element.id = `panel-${i}`;
      page.element.setAttribute("role", "tabpanel");
      page.element.setAttribute("aria-labelledby", tab.id);
      page.element.tabIndex = 0;
      return tab;
    });
    const bar = make("div", "tabs", ...this.tabs);
    bar.setAttribute("role", "tablist");
    bar.addEventListener("keydown", (event) => this.moveTab(event));
    this.element.append(this.sash(), bar, ...this.pages.map((page) => page.element));
    let before = app.selected;
    app.on(["selection"], () => {
      if (app.selected !== null && app.selected.record !== before?.record && this.open !== PATH) this.show(INSTRUCTION);
      else this.later();
      before = app.selected;
    });
    app.on(["range"], () => {
      if (app.range !== null && this.open !== STATISTICS) this.show(STATISTICS);
      else this.later();
    });
    app.on(["critical"], () => {
      if (app.critical) this.show(PATH);
    });
    let count = 0;
    app.on(["panes"], () => {
      if (app.panes.length > 1 && count < 2) this.show(COMPARE);
      else this.later();
      count = app.panes.length;
    });
    app.on(["step", "theme", "colour", "view"], () => this.later());
    this.show(SUMMARY);
  }

  /** The edge that makes the panel wider or narrower. */
  private sash(): HTMLElement {
    const sash = make("div", "sash");
    sash.addEventListener("pointerdown", (event) => sash.setPointerCapture(event.pointerId));
    sash.addEventListener("pointermove", (event) => {
      if (!sash.hasPointerCapture(event.pointerId)) return;
      const width = this.element.getBoundingClientRect().right - event.clientX;
      this.element.style.width = `${Math.max(300, Math.min(0.7 * window.innerWidth, width))}px`;
    });
    return sash;
  }

  /** Arrows, Home and End go from tab to tab. */
  private moveTab(event: KeyboardEvent): void {
    const last = this.tabs.length - 1;
    const targets: Readonly<Record<string, number>> = {
      ArrowLeft: this.open > 0 ? this.open - 1 : last,
      ArrowRight: this.open < last ? this.open + 1 : 0,
      Home: 0,
      End: last,
    };
    const target = targets[event.key];
    if (target === undefined) return;
    event.preventDefault();
    // The timeline has these keys too.
    event.stopPropagation();
    this.show(target);
    this.tabs[target]!.focus();
  }

  show(index: number): void {
    this.open = index;
    this.pages.forEach((page, i) => {
      page.element.hidden = i !== index;
      this.tabs[i]!.setAttribute("aria-selected", String(i === index));
      this.tabs[i]!.tabIndex = i === index ? 0 : -1;
    });
    this.later();
  }

  /** Numbers follow when the view stands still: drawing goes first. */
  private later(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.pages[this.open]!.render(), 90);
  }
}
