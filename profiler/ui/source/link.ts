/** The state of the view in the hash of the address, so that it can be sent to others. */

import type { App } from "./app.ts";
import { MODES, type Mode } from "./colour.ts";

const DELAY_MS = 250;

function numbers(text: string | null): number[] | null {
  if (text === null) return null;
  const found = text.split("_").map(Number);
  return found.length > 0 && found.every(Number.isFinite) ? found : null;
}

function write(app: App): string {
  const { main, view } = app;
  if (main === undefined) return "";
  const parameters = new URLSearchParams();
  const digits = view.span < 1000 ? 1 : 0;
  parameters.set("view", `${view.begin.toFixed(digits)}_${view.end.toFixed(digits)}`);
  parameters.set("step", String(main.trace.stepNumber[main.step]));
  const other = app.panes[1];
  if (other !== undefined) parameters.set("step_b", String(other.trace.stepNumber[other.step]));
  if (app.selected !== null) {
    const { pane, record } = app.selected;
    parameters.set(pane === main ? "record" : "record_b", String(pane.trace.fileIndex[record]));
  }
  if (app.mode !== "phase") parameters.set("colour", app.mode);
  if (app.critical) parameters.set("critical", "1");
  if (app.query) parameters.set("search", app.query);
  if (app.range !== null) {
    const { begin, end, workers, pane } = app.range;
    parameters.set(pane === main ? "range" : "range_b", [begin.toFixed(0), end.toFixed(0), ...workers].join("_"));
  }
  if (main.rows.openWorkers.length > 0) parameters.set("open", main.rows.openWorkers.slice(0, 50).join("_"));
  if (!main.fitRows) parameters.set("rows", `${main.rows.rowHeight}_${Math.round(main.scroll)}`);
  return `#${parameters.toString()}`;
}

function apply(app: App, hash: string): void {
  const { main } = app;
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  if (main === undefined || hash.length < 2) return;
  const { trace } = main;
  const mode = MODES.find((m) => m === parameters.get("colour"));
  const wanted: Mode = mode ?? "phase";
  if (wanted !== app.mode) app.setMode(wanted);
  if ((parameters.get("critical") === "1") !== app.critical) app.setCritical(!app.critical);
  app.search(parameters.get("search") ?? "");
  const valid = (worker: number): boolean => Number.isInteger(worker) && worker >= 0 && worker < trace.workers;
  for (const worker of numbers(parameters.get("open")) ?? []) if (valid(worker)) main.rows.toggle(worker, true);
  const rows = numbers(parameters.get("rows"));
  if (rows !== null && rows.length === 2) {
    main.fitRows = false;
    main.rows.setRowHeight(rows[0]!);
    main.scrollTo(rows[1]!);
  }
  app.panes.forEach((pane, i) => {
    const index = numbers(parameters.get(i ? "record_b" : "record"))?.[0];
    const record = index === undefined ? undefined : pane.trace.byFile[index];
    if (record !== undefined) app.select(pane, record, false);
  });
  app.panes.forEach((pane, i) => {
    const step = pane.trace.stepNumber.indexOf(Number(parameters.get(i ? "step_b" : "step") ?? -1));
    if (step >= 0 && step !== pane.step) app.alignStep(pane, step);
  });
  app.panes.forEach((pane, i) => {
    const range = numbers(parameters.get(i ? "range_b" : "range"));
    if (range === null || range.length !== 4) return;
    const [first, last] = [range[2]!, range[3]!];
    const workers = pane.trace.workers;
    if (![first, last].every(Number.isInteger) || first < 0 || last <= first || last > workers) return;
    const [begin, end] = [Math.max(0, range[0]!), Math.min(pane.trace.end, range[1]!)];
    if (end > begin) app.setRange({ pane, begin, end, workers: [first, last] });
  });
  const window = numbers(parameters.get("view"));
  if (window !== null && window.length === 2 && window[1]! > window[0]!) {
    app.motion.stop();
    app.view.show(window[0]!, window[1]!);
  }
  app.changed("view");
}

/** Keep the address in step with the view, and follow an address that is changed by hand. */
export class Link {
  private timer = 0;
  private written = "";
  private pending = location.hash;

  constructor(private readonly app: App) {
    app.on(["view", "selection", "range", "colour", "search", "step", "critical"], () => {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.write(), DELAY_MS);
    });
    window.addEventListener("hashchange", () => {
      if (location.hash !== this.written) apply(app, location.hash);
    });
  }

  /** Apply the address that the page was opened with, once its trace is there. */
  restore(): void {
    apply(this.app, this.pending);
    this.pending = "";
  }

  private write(): void {
    if (this.app.main === undefined || this.pending !== "") return;
    this.written = write(this.app);
    history.replaceState(null, "", this.written);
  }
}
