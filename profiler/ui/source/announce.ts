/** Says what was selected to those who hear the page. */

import type { App } from "./app.ts";
import { make } from "./dom.ts";
import { duration } from "./format.ts";

function describe(app: App, what: "selection" | "range"): string {
  const { selected, range } = app;
  if (what === "range" && range !== null) {
    const [low, high] = range.workers;
    const all = low === 0 && high === range.pane.trace.workers;
    return `${app.sideOf(range.pane)}selected ${duration(range.end - range.begin)} of ${all ? "all workers" : `workers ${low} to ${high - 1}`}`;
  }
  if (selected === null) return "nothing is selected";
  const { trace } = selected.pane;
  const { record } = selected;
  const [begin, end] = trace.span(record);
  return (
    `${app.sideOf(selected.pane)}${trace.labelOf(record) || trace.kindOf(record)} on worker ${trace.workerName(trace.worker[record]!)}, ` +
    `step ${trace.stepNumber[trace.step[record]!]}, ${duration(end - begin)}, of which ${duration(trace.waitOf(record))} waiting`
  );
}

/** A line that is heard, not seen; it follows the selection, however that was made. */
export function announce(app: App): HTMLElement {
  const line = make("div", "unseen");
  line.setAttribute("aria-live", "polite");
  let { selected, range } = app;
  app.on(["selection", "range"], () => {
    const what = range !== app.range ? "range" : "selection";
    if (selected === app.selected && range === app.range) return;
    ({ selected, range } = app);
    line.textContent = describe(app, what);
  });
  return line;
}
