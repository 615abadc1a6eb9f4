/** The bar above the timeline: files, step, colours, search; and the legend below it. */

import type { App } from "./app.ts";
import { MODES, type Mode, css } from "./colour.ts";
import { button, make } from "./dom.ts";
import { integer } from "./format.ts";
import { HELP } from "./query.ts";
import { STATES, STATE_HELP } from "./roles.ts";

export interface ToolbarActions {
  openFile(beside: boolean): void;
  saveHtml(): void;
  toggleTheme(): void;
  togglePanel(): void;
  help(): void;
}

const SEARCH_DELAY_MS = 160;
const MAX_LEGEND = 40;

export class Toolbar {
  readonly element = make("header", "toolbar");
  readonly legend = make("div", "legend");
  private readonly title = make("span", "title", "megavm profiler");
  private readonly step = make("select");
  private readonly colour = make("select");
  private readonly search = make("input", "search");
  private readonly count = make("output", "count");
  private readonly critical: HTMLButtonElement;
  private timer = 0;

  constructor(
    private readonly app: App,
    actions: ToolbarActions,
  ) {
    for (const mode of MODES) this.colour.append(new Option(mode, mode));
    this.colour.title = "what the colours stand for (keys 1 to 5)";
    this.colour.addEventListener("change", () => {
      app.setMode(this.colour.value as Mode);
      app.stage.overlay.focus();
    });
    this.step.title = "the step that is looked at (keys , and .)";
    this.step.addEventListener("change", () => {
      app.setStep(Number(this.step.value), true);
      app.stage.overlay.focus();
    });
    this.search.type = "search";
    this.search.placeholder = "Search: kind:attention layer:12 worker:7 wait>3us";
    this.search.title = HELP;
    this.search.spellcheck = false;
    this.search.setAttribute("aria-label", "search");
    this.listenToSearch();
    this.critical = button("Critical path", "highlight the critical path of the step (C)", () => {
      app.setCritical(!app.critical);
    });
    this.element.append(
      this.title,
      make("span", "group", button("Open", "open a trace (O)", () => actions.openFile(false)), button("Compare", "open a second trace below", () => actions.openFile(true))),
      make("label", "group", "Step ", this.step),
      make("label", "group", "Colour ", this.colour),
      make(
        "span",
        "group",
        this.signButton("+", "zoom in", "W", () => app.zoomBy(0.5)),
        this.signButton("\u2212", "zoom out", "S", () => app.zoomBy(2)),
        this.signButton("\u2194", "show the step", "G", () => app.showStep()),
        this.signButton("\u21e4\u21e5", "show everything", "Home", () => app.showAll()),
      ),
      this.critical,
      make(
        "span",
        "group grow",
        this.search,
        this.signButton("‹", "the match before", "Shift N", () => app.nextMatch(-1)),
        this.signButton("›", "the next match", "N", () => app.nextMatch(1)),
        this.count,
      ),
      make(
        "span",
        "group",
        button("Save as HTML", "one file with page and trace in it", actions.saveHtml),
        button("Panel", "show or hide the panel (I)", actions.togglePanel),
        button("Theme", "light or dark (T)", actions.toggleTheme),
        button("?", "keys and mouse", actions.help),
      ),
    );
    app.on(["panes"], () => this.showPanes());
    app.on(["step", "panes"], () => (this.step.value = String(app.main?.step ?? 0)));
    app.on(["colour", "theme", "panes"], () => this.showLegend());
    app.on(["search", "panes", "selection"], () => this.showCount());
    app.on(["critical"], () => this.critical.setAttribute("aria-pressed", String(app.critical)));
  }

  private signButton(sign: string, name: string, key: string, action: () => void): HTMLButtonElement {
    const made = button(sign, `${name} (${key})`, action, "small");
    made.setAttribute("aria-label", name);
    return made;
  }

  focusSearch(): void {
    this.search.focus();
    this.search.select();
  }

  private listenToSearch(): void {
    const { app, search } = this;
    search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => app.search(search.value), SEARCH_DELAY_MS);
    });
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        clearTimeout(this.timer);
        app.search(search.value);
        app.nextMatch(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        search.value = "";
        clearTimeout(this.timer);
        app.search("");
        search.blur();
        app.stage.overlay.focus();
      }
    });
  }

  private showPanes(): void {
    const { app } = this;
    const { main } = app;
    if (main === undefined) return;
    const { trace } = main;
    const parts = [trace.name, trace.model, trace.machine.device || trace.machine.name];
    this.title.textContent = app.panes.map((pane) => pane.trace.name).join("  |  ");
    this.title.title = parts.filter(Boolean).join(" · ");
    document.title = `${this.title.textContent} - megavm profiler`;
    this.step.replaceChildren(...Array.from(trace.stepNumber, (n, s) => new Option(String(n), String(s))));
  }

  private showCount(): void {
    const { app } = this;
    if (this.search !== document.activeElement || this.search.value === "") this.search.value = app.query;
    const { matches, matchIndex, queryError } = app;
    this.count.classList.toggle("error", queryError !== "");
    if (queryError !== "") this.count.textContent = queryError;
    else if (matches === null) this.count.textContent = "";
    else {
      const place = matchIndex >= 0 ? `${integer(matchIndex + 1)} of ` : "";
      this.count.textContent = `${place}${integer(matches.records.length)} found`;
    }
  }

  /** What the colours of the workers track stand for. */
  private states(): HTMLElement {
    const entries = STATES.map((name, state) => {
      const dot = make("i", "dot");
      dot.style.background = css(this.app.theme.states[state]!);
      const entry = make("span", "state", dot, name);
      entry.title = STATE_HELP[state]!;
      return entry;
    });
    return make("span", "states", "workers:", ...entries);
  }

  private showLegend(): void {
    const { app } = this;
    this.colour.value = app.mode;
    const entries = app.main?.painting.legend ?? [];
    const names = new Set<string>();
    const shown = app.panes.flatMap((pane) => pane.painting.legend).filter((e) => !names.has(e.name) && names.add(e.name));
    this.legend.replaceChildren(
      ...shown.slice(0, MAX_LEGEND).map(({ name, colour, query }) => {
        const dot = make("i", "dot");
        dot.style.background = colour;
        if (query === "") return make("span", "entry", dot, name);
        const entry = button("", `show only these: ${query}`, () => app.search(app.query === query ? "" : query), "entry");
        entry.append(dot, name);
        entry.setAttribute("aria-pressed", String(app.query === query));
        return entry;
      }),
      this.states(),
    );
    this.legend.hidden = entries.length === 0;
  }
}
