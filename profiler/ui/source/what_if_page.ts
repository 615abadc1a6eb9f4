/** The step of the summary with one thing changed: what would help, and how much. */

import type { App } from "./app.ts";
import { make } from "./dom.ts";
import { duration, percent } from "./format.ts";
import type { Pane } from "./pane.ts";
import type { Page } from "./panel.ts";
import type { Change, WhatIf } from "./summary.ts";
import { isSame, ofPanes, queryFor } from "./summary_page.ts";
import { makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";

/** Changes that bring less are not listed: ns. */
const LEAST = 1;

export class WhatIfPage implements Page {
  readonly name = "What if";
  readonly element = make("section", "page");
  private shown: readonly unknown[] = [];

  constructor(private readonly app: App) {}

  render(): void {
    const { panes } = this.app;
    const shown = panes.map((pane) => pane.trace);
    if (isSame(shown, this.shown)) return;
    this.shown = shown;
    this.element.replaceChildren(
      ...ofPanes(panes, (pane, { step, whatIf }) =>
        typeof whatIf === "string" ? [make("p", "hint", `There is no replay: ${whatIf}.`)] : this.parts(pane, step, whatIf),
      ),
    );
  }

  private parts(pane: Pane, step: number, found: WhatIf): HTMLElement[] {
    const gains = found.changes.filter((change) => change.saved >= LEAST);
    return [
      make(
        "p",
        "faint",
        `Step ${pane.trace.stepNumber[step]}, replayed along its dependencies with one thing changed. ` +
          "What its loads and waits hid was not seen, and is estimated: docs/profiling.md says how well.",
      ),
      pair("step", duration(found.recorded)),
      pair("replayed with nothing changed", duration(found.replayed)),
      ...(found.memory > 0 ? [pair("its bytes alone take", duration(found.memory))] : []),
      make("h3", "", "Single changes"),
      gains.length > 0 ? this.table(gains, found) : make("p", "hint", "No single change makes the step shorter."),
      make(
        "p",
        "faint",
        "* As long as the memory needs for the step's bytes. " +
          "Other factors, and several changes at once: “megavm trace what-if FILE computing:gate_up=0.8 latency=0.5”.",
      ),
    ];
  }

  private table(gains: readonly Change[], { replayed }: WhatIf): HTMLElement {
    const most = Math.max(1, gains[0]?.saved ?? 1);
    return makeTable<Change>(
      [
        { title: "change", text: (c) => c.text, className: () => "wrap" },
        { title: "step", text: (c) => duration(c.time) + (c.memoryBound ? "*" : ""), value: (c) => c.time, help: "how long it would take" },
        { title: "saved", text: (c) => duration(c.saved), value: (c) => c.saved, bar: (c) => c.saved / most },
        { title: "part", text: (c) => percent(c.saved / Math.max(1, replayed)), value: (c) => c.saved },
      ],
      gains,
      ({ what, of }) => {
        const query = queryFor(what, of);
        if (query !== null) this.app.search(query);
      },
    );
  }
}
