/** The step of the summary with one thing changed: what would help, and how much. */

import type { App } from "./app.ts";
import { changesTable } from "./changes_table.ts";
import { make } from "./dom.ts";
import { duration } from "./format.ts";
import type { Pane } from "./pane.ts";
import type { Page } from "./panel.ts";
import type { WhatIf } from "./summary.ts";
import { isSame, ofPanes } from "./summary_page.ts";
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
      gains.length > 0 ? changesTable(this.app, gains, found.replayed) : make("p", "hint", "No single change makes the step shorter."),
      make(
        "p",
        "faint",
        "What takes no time or is not waited for is a bound, not a change that could be made. * As long as the memory needs for the step's bytes. " +
          "Other factors, and several changes at once: “megavm trace what-if FILE computing:gate_up=0.8 latency=0.5”.",
      ),
    ];
  }
}
