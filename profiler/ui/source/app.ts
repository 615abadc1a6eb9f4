/** The state of the page and everything that can be done to it. Inputs call it; panels listen to it. */

import { DARK, LIGHT, type Mode, type Theme } from "./colour.ts";
import { type Arrows, type Range, arrowsOf } from "./draw_overlay.ts";
import { Motion } from "./motion.ts";
import { Pane } from "./pane.ts";
import { type Matches, QueryError, find, firstFrom } from "./query.ts";
import { type Scene, Stage } from "./stage.ts";
import type { Trace } from "./trace.ts";
import { View } from "./view.ts";

/** What changed. */
export type Change = "panes" | "view" | "selection" | "hover" | "range" | "colour" | "search" | "step" | "critical" | "theme";

export interface Selection {
  readonly pane: Pane;
  readonly record: number;
  readonly arrows: Arrows;
}

export class App implements Scene {
  readonly panes: Pane[] = [];
  readonly view = new View(0, 1);
  readonly stage: Stage;
  readonly motion: Motion;
  mode: Mode = "phase";
  theme: Theme;
  critical = false;
  range: Range | null = null;
  selected: Selection | null = null;
  hovered: { readonly pane: Pane; readonly record: number } | null = null;
  cursor: number | null = null;
  query = "";
  queryError = "";
  /** Which of the main pane's matches is selected; -1: none. */
  matchIndex = -1;
  /** Milliseconds that the last pictures took to draw. */
  readonly drawTimes: number[] = [];
  private readonly listeners = new Map<Change, (() => void)[]>();
  private readonly changes = new Set<Change>();
  private scheduled = false;

  constructor(element: HTMLElement, dark: boolean) {
    this.theme = dark ? DARK : LIGHT;
    this.stage = new Stage(element);
    this.motion = new Motion(this.view, () => this.changed("view"));
    new ResizeObserver(() => {
      this.stage.resize(this.panes);
      this.changed("view");
    }).observe(element);
  }

  /** "A: " or "B: ", where two traces are shown. */
  sideOf(pane: Pane): string {
    return this.panes.length > 1 ? `${pane.letter}: ` : "";
  }

  get main(): Pane | undefined {
    return this.panes[0];
  }

  on(changes: readonly Change[], listener: () => void): void {
    for (const change of changes) {
      const list = this.listeners.get(change) ?? [];
      list.push(listener);
      this.listeners.set(change, list);
    }
  }

  /** Say that something changed: the picture follows with the next frame, and the listeners. */
  changed(...changes: readonly Change[]): void {
    for (const change of changes) this.changes.add(change);
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => this.flush());
  }

  /** Draw and tell the listeners now. */
  flush(): void {
    this.scheduled = false;
    const changes = [...this.changes];
    this.changes.clear();
    const pictured = changes.some((c) => c !== "hover" && c !== "selection" && c !== "range" && c !== "critical");
    const start = performance.now();
    if (pictured) {
      this.stage.draw(this);
      if (this.drawTimes.push(performance.now() - start) > 2000) this.drawTimes.shift();
    } else {
      this.stage.drawOverlay(this);
    }
    const told = new Set<() => void>();
    for (const change of changes) {
      for (const listener of this.listeners.get(change) ?? []) {
        if (!told.has(listener)) {
          told.add(listener);
          listener();
        }
      }
    }
  }

  /** Show a trace alone, or beside the one that is open. */
  open(trace: Trace, beside: boolean): void {
    const compare = beside && this.panes.length > 0;
    const pane = new Pane(trace, compare ? "B" : "A", this.theme, this.mode);
    this.panes.length = compare ? 1 : 0;
    this.panes.push(pane);
    this.selected = this.hovered = this.range = null;
    this.matchIndex = -1;
    for (const p of this.panes) p.fitRows = true;
    pane.step = compare ? trace.likeStep(this.panes[0]!.trace, this.panes[0]!.step) : trace.typicalStep();
    this.stage.resize(this.panes);
    this.align();
    this.findMatches();
    this.repaint();
    if (compare) this.showStep();
    else this.view.show(...this.stepWindow());
    this.changed("panes", "view", "selection", "range", "search", "step");
  }

  /** Show a newer trace of the same program in place of the one that is open: one looks where one looked before. */
  replace(trace: Trace): void {
    const [before, second] = this.panes;
    const { begin, end, limits } = this.view;
    this.open(trace, false);
    const { main } = this;
    if (before === undefined || second !== undefined || main === undefined || main.trace.workers !== before.trace.workers) return;
    const [from, to] = [before.trace.stepBegin[before.step]!, before.trace.stepEnd[before.step]!];
    if (begin <= limits[0] && end >= limits[1]) this.view.show(...this.view.limits);
    else if (begin > from || end < to) {
      const by = main.trace.stepBegin[main.step]! - from;
      this.view.show(begin + by, end + by);
    }
    main.fitRows = before.fitRows;
    main.rows.setRowHeight(before.rows.rowHeight);
    for (const worker of before.rows.openWorkers) main.rows.toggle(worker, true);
    main.scrollTo(before.scroll);
  }

  /** Close the second trace. */
  closeCompare(): void {
    if (this.panes.length < 2) return;
    this.panes.length = 1;
    this.selected = this.hovered = this.range = null;
    this.panes[0]!.fitRows = true;
    this.stage.resize(this.panes);
    this.align();
    this.showStep();
    this.changed("panes", "view", "selection", "range", "step");
  }

  /** Put the panes beside each other: time 0 is where the step that is looked at begins. */
  private align(): void {
    let low = Infinity;
    let high = -Infinity;
    for (const pane of this.panes) {
      pane.origin = this.panes.length > 1 ? pane.trace.stepBegin[pane.step]! : 0;
      low = Math.min(low, -pane.origin);
      high = Math.max(high, pane.trace.end - pane.origin);
    }
    if (this.panes.length > 0) this.view.setLimits(low, high);
  }

  private repaint(): void {
    for (const pane of this.panes) pane.repaint(this.mode, this.theme, this.critical);
    this.changed("colour");
  }

  setMode(mode: Mode): void {
    this.mode = mode;
    this.repaint();
  }

  setTheme(dark: boolean): void {
    this.theme = dark ? DARK : LIGHT;
    this.repaint();
    this.changed("theme");
  }

  setCritical(on: boolean): void {
    this.critical = on;
    this.repaint();
    this.changed("critical");
  }

  /** Align one pane at another step of its own. */
  alignStep(pane: Pane, step: number): void {
    pane.step = Math.max(0, Math.min(pane.trace.steps - 1, step));
    this.align();
    this.showStep();
    if (this.critical) this.repaint();
    this.changed("step", "view");
  }

  /** Look at a step of the main pane, and at the same one of the other. */
  setStep(step: number, show: boolean): void {
    const { main } = this;
    if (main === undefined) return;
    const by = Math.max(0, Math.min(main.trace.steps - 1, step)) - main.step;
    const before = this.view.begin + main.origin;
    for (const pane of this.panes) pane.step = Math.max(0, Math.min(pane.step + by, pane.trace.steps - 1));
    this.align();
    if (show) this.showStep();
    else this.view.show(before - main.origin, before - main.origin + this.view.span);
    if (this.critical) this.repaint();
    this.changed("step", "view");
  }

  /** The time of the step that is looked at, of all panes, with a margin. */
  private stepWindow(): [number, number] {
    let low = Infinity;
    let high = -Infinity;
    for (const { trace, step, origin } of this.panes) {
      low = Math.min(low, trace.stepBegin[step]! - origin);
      high = Math.max(high, trace.stepEnd[step]! - origin);
    }
    const margin = 0.03 * (high - low);
    return [low - margin, high + margin];
  }

  /** Show the whole of the step that is looked at, in all panes. */
  showStep(): void {
    const [low, high] = this.stepWindow();
    if (high > low) this.motion.glide(low, high);
  }

  /** Zoom around the middle of the view (below 1: in). */
  zoomBy(factor: number): void {
    const { begin, end } = this.view;
    const by = ((end - begin) * (1 - factor)) / 2;
    this.motion.glide(begin + by, end - by);
  }

  showAll(): void {
    const [low, high] = this.view.limits;
    this.motion.glide(low, high);
    for (const pane of this.panes) {
      pane.fitRows = true;
      pane.rows.closeAll();
    }
    this.stage.resize(this.panes);
    this.changed("view");
  }

  /** Show the selected range, the selected instruction, or everything. */
  focus(): void {
    if (this.range !== null) {
      const { pane, begin, end } = this.range;
      const margin = 0.02 * (end - begin);
      this.motion.glide(begin - pane.origin - margin, end - pane.origin + margin);
    } else if (this.selected !== null) {
      const { pane, record } = this.selected;
      const [low, high] = pane.trace.extent(record);
      const margin = Math.max(50, 0.6 * (high - low));
      this.motion.glide(low - pane.origin - margin, high - pane.origin + margin);
      this.revealWorker(pane, record);
    } else {
      this.showAll();
    }
  }

  private revealWorker(pane: Pane, record: number): void {
    pane.reveal(pane.trace.worker[record]!);
  }

  /** Select a record; `reveal` moves the view so that it is seen. */
  select(pane: Pane, record: number, reveal: boolean): void {
    // The step that is looked at is that of the record. Two traces stay aligned as they are.
    const step = pane.trace.step[record]!;
    if (this.panes.length === 1 && step !== pane.step) this.setStep(step, false);
    this.selected = { pane, record, arrows: arrowsOf(pane, record) };
    if (reveal) {
      const [from, to] = pane.trace.span(record);
      const [low, high] = [from - pane.origin, to - pane.origin];
      const { begin, end, span } = this.view;
      this.revealWorker(pane, record);
      if (low < begin + 0.03 * span || high > end - 0.03 * span || high - low < span / 400) {
        const wanted = high - low < span / 400 ? (high - low) * 60 : Math.max(span, (high - low) * 1.5);
        this.motion.glide((low + high) / 2 - wanted / 2, (low + high) / 2 + wanted / 2);
      }
      this.changed("view");
    }
    this.changed("selection");
  }

  clear(): void {
    if (this.range !== null) this.range = null;
    else this.selected = null;
    this.changed("selection", "range");
  }

  hover(pane: Pane | null, record: number, cursor: number | null): void {
    this.hovered = pane !== null && record >= 0 ? { pane, record } : null;
    this.cursor = cursor;
    this.changed("hover");
  }

  setRange(range: Range | null): void {
    this.range = range;
    this.changed("range");
  }

  /** Follow the cause of the selected record (-1), or go to what it caused (1). */
  follow(direction: -1 | 1): void {
    const pane = this.selected?.pane ?? this.main;
    if (pane === undefined) return;
    if (this.selected === null) {
      const path = pane.causes.path(pane.step);
      const entry = direction < 0 ? path[path.length - 1] : path[0];
      if (entry !== undefined) this.select(pane, entry.record, true);
      return;
    }
    const { record } = this.selected;
    const next = direction < 0 ? pane.trace.cause[record]! : pane.causes.forward(record);
    if (next >= 0) this.select(pane, next, true);
  }

  /** Go to the next record of the worker (along), or to the one at the same time of another worker (across). */
  move(along: number, across: number): void {
    const pane = this.selected?.pane ?? this.main;
    if (pane === undefined) return;
    const { trace } = pane;
    if (this.selected === null) {
      const time = this.view.begin + pane.origin + this.view.span / 2;
      this.selectAt(pane, pane.workerAt(pane.body.top + 1), time);
      return;
    }
    const { record } = this.selected;
    const worker = trace.worker[record]!;
    if (along !== 0) {
      const next = record + along;
      if (next >= trace.workerOffsets[worker]! && next < trace.workerOffsets[worker + 1]!) this.select(pane, next, true);
      return;
    }
    const [from, to] = trace.span(record);
    const other = worker + across;
    if (other >= 0 && other < trace.workers) this.selectAt(pane, other, (from + to) / 2);
  }

  private selectAt(pane: Pane, worker: number, time: number): void {
    const { trace } = pane;
    const lane = trace.lanes[2]!;
    const last = trace.workerOffsets[worker + 1]!;
    if (!lane.used || last === trace.workerOffsets[worker]) return;
    let best = -1;
    let nearest = Infinity;
    for (let r = trace.firstAfter(lane, worker, time); r < last; r++) {
      const [from, to] = trace.span(r);
      const distance = Math.max(from - time, time - to, 0);
      if (distance < nearest) {
        nearest = distance;
        best = r;
      }
      if (from > time) break;
    }
    if (best >= 0) this.select(pane, best, true);
  }

  search(query: string): void {
    if (query === this.query) return;
    this.query = query;
    this.matchIndex = -1;
    this.findMatches();
    this.repaint();
    this.changed("search");
  }

  private findMatches(): void {
    this.queryError = "";
    for (const pane of this.panes) {
      try {
        pane.matches = find(pane.trace, this.query);
      } catch (error) {
        if (!(error instanceof QueryError)) throw error;
        pane.matches = null;
        this.queryError = error.message;
      }
    }
  }

  get matches(): Matches | null {
    return this.main?.matches ?? null;
  }

  /** Select the next match after (1) or before (-1) the selected one, or the first one in view. */
  nextMatch(direction: -1 | 1): void {
    const { main, matches } = this;
    if (main === undefined || matches === null || matches.records.length === 0) return;
    const count = matches.records.length;
    if (this.matchIndex < 0) {
      const first = firstFrom(matches.begins, this.view.begin + main.origin);
      this.matchIndex = direction > 0 ? first % count : (first - 1 + count) % count;
    } else {
      this.matchIndex = (this.matchIndex + direction + count) % count;
    }
    this.select(main, matches.records[this.matchIndex]!, true);
    this.changed("search");
  }

  toggleWorker(pane: Pane, worker: number): void {
    pane.rows.toggle(worker);
    pane.scrollTo(pane.scroll);
    this.changed("view");
  }
}
