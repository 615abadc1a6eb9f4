/** One trace on the page: its tracks and rows, where they lie, and what is at a point. */

import { Activity } from "./activity.ts";
import { Causes } from "./dependencies.ts";
import { type Mode, type Painting, type Theme, paint } from "./colour.ts";
import { DENSE_BELOW } from "./density.ts";
import { Phases, type Piece, pieceAfter } from "./phases.ts";
import type { Matches } from "./query.ts";
import { Raster } from "./raster.ts";
import { CONSUMER } from "./roles.ts";
import { type LaneRow, Rows } from "./rows.ts";
import type { Trace } from "./trace.ts";
import type { View } from "./view.ts";

/** A part of the canvas, in CSS pixels. */
export interface Box {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
}

const BANDWIDTH_HEIGHT = 56;
const STATES_HEIGHT = 44;
const GAP = 4;
const BAND_HEIGHT = 16;
const TITLE_HEIGHT = 20;
/** The tallest rows that are made of themselves. */
const MAX_FIT = 110;

export class Pane {
  readonly activity: Activity;
  readonly causes: Causes;
  readonly phases: Phases;
  readonly rows: Rows;
  raster: Raster;
  /** The time of the trace that is 0 in the view. */
  origin = 0;
  scroll = 0;
  /** Whether the height of rows follows that of the pane. */
  fitRows = true;
  /** The step that is looked at: its critical path, its statistics, what the panes are aligned at. */
  step = 0;
  matches: Matches | null = null;
  private ceiling = 0;
  title: Box = { left: 0, top: 0, width: 0, height: 0 };
  layerBand: Box = this.title;
  phaseBand: Box = this.title;
  bandwidth: Box = this.title;
  states: Box = this.title;
  body: Box = this.title;

  constructor(
    readonly trace: Trace,
    readonly letter: "A" | "B",
    theme: Theme,
    mode: Mode,
  ) {
    this.activity = new Activity(trace);
    this.causes = new Causes(trace);
    this.phases = new Phases(trace);
    this.rows = new Rows(trace);
    this.raster = new Raster(trace, paint(trace, mode, theme, null));
  }

  /** What the bandwidth track reaches up to, in GB/s: the machine's ceiling, or the most that there was. */
  get bandwidthCeiling(): number {
    if (this.ceiling === 0) {
      // Not the highest of peaks: a rate that one sample of two hundred is above.
      const count = Math.max(200, Math.min(50000, Math.floor(this.trace.end / 1000)));
      const { bandwidth } = this.activity.sample(0, this.trace.end, count);
      const high = bandwidth.sort()[Math.floor(0.995 * count)]!;
      this.ceiling = Math.max(1e-3, this.trace.machine.bandwidth ?? 0, high);
    }
    return this.ceiling;
  }

  get painting(): Painting {
    return this.raster.painting;
  }

  /** Colour the records anew. Records that are not in focus are dimmed. */
  repaint(mode: Mode, theme: Theme, critical: boolean): void {
    const { matches } = this;
    let onPath: Set<number> | null = null;
    if (critical) onPath = new Set(this.causes.path(this.step).map((entry) => entry.record));
    const dimmed =
      onPath === null && matches === null
        ? null
        : (r: number): boolean =>
            !((onPath !== null && onPath.has(r)) || (matches !== null && matches.mask[r] === 1));
    this.raster = new Raster(this.trace, paint(this.trace, mode, theme, dimmed));
  }

  /** Divide a part of the canvas among title, tracks and rows. */
  place(box: Box, gutter: number, titled: boolean): void {
    const left = box.left + gutter;
    const width = Math.max(1, box.width - gutter);
    let top = box.top;
    const take = (height: number): Box => {
      const taken = { left, top, width, height };
      top += height;
      return taken;
    };
    this.title = take(titled ? TITLE_HEIGHT : 0);
    const small = box.height < 240;
    this.layerBand = take(small || this.phases.layers.length === 0 ? 0 : BAND_HEIGHT);
    this.phaseBand = take(BAND_HEIGHT);
    top += GAP;
    this.bandwidth = take(small ? 32 : BANDWIDTH_HEIGHT);
    top += GAP;
    this.states = take(small ? 24 : STATES_HEIGHT);
    top += GAP;
    this.body = { left, top, width, height: Math.max(20, box.top + box.height - top) };
    if (this.fitRows) {
      const height = this.body.height / this.trace.workers;
      this.rows.setRowHeight(Math.max(1, Math.min(MAX_FIT, height >= DENSE_BELOW ? Math.floor(height) : height)));
    }
    this.scrollTo(this.scroll);
  }

  get maxScroll(): number {
    return Math.max(0, this.rows.height - this.body.height);
  }

  scrollTo(scroll: number): void {
    this.scroll = Math.max(0, Math.min(this.maxScroll, scroll));
  }

  /** Scroll as little as makes a worker visible. */
  reveal(worker: number): void {
    const top = this.rows.top(worker);
    const bottom = this.rows.bottom(worker);
    if (top < this.scroll) this.scrollTo(top);
    else if (bottom > this.scroll + this.body.height) this.scrollTo(bottom - this.body.height);
  }

  /** Make rows taller or lower around a height on the canvas that stays where it is. */
  scaleRows(factor: number, y: number): void {
    const worker = this.rows.workerAt(y - this.body.top + this.scroll);
    const part = (y - this.body.top + this.scroll - this.rows.top(worker)) / Math.max(1, this.rows.rowHeight);
    const height = this.rows.rowHeight * factor;
    const least = Math.min(6, this.body.height / this.trace.workers);
    this.rows.setRowHeight(Math.max(least, height >= DENSE_BELOW ? Math.round(height) : height));
    this.fitRows = false;
    this.scrollTo(this.rows.top(worker) + part * this.rows.rowHeight - (y - this.body.top));
  }

  timeAt(view: View, x: number): number {
    return view.begin + ((x - this.body.left) / this.body.width) * view.span + this.origin;
  }

  xOf(view: View, time: number): number {
    return this.body.left + ((time - this.origin - view.begin) / view.span) * this.body.width;
  }

  /** Top of a worker's row on the canvas. */
  yOf(worker: number): number {
    return this.body.top + this.rows.top(worker) - this.scroll;
  }

  workerAt(y: number): number {
    return this.rows.workerAt(y - this.body.top + this.scroll);
  }

  contains(y: number): boolean {
    return y >= this.title.top && y < this.body.top + this.body.height;
  }

  /** The layer or phase at a height of the canvas and a time. */
  pieceAt(y: number, time: number): Piece | null {
    if (y < this.layerBand.top || y >= this.phaseBand.top + this.phaseBand.height) return null;
    const pieces = y < this.phaseBand.top ? this.phases.layers : this.phases.phases;
    const piece = pieces[pieceAfter(pieces, time)];
    return piece !== undefined && piece.begin <= time ? piece : null;
  }

  inBody(x: number, y: number): boolean {
    const { left, top, height } = this.body;
    return x >= left && y >= top && y < top + Math.min(height, this.rows.height - this.scroll);
  }

  laneAt(y: number): LaneRow | null {
    const inside = y - this.body.top + this.scroll;
    if (inside < 0 || inside >= this.rows.height) return null;
    const lanes = this.rows.lanes(this.rows.workerAt(inside));
    return lanes.find((lane) => inside < lane.top + lane.height) ?? lanes[lanes.length - 1] ?? null;
  }

  /** The record at a point of the canvas, the nearest one within three pixels; -1: none. */
  recordAt(view: View, x: number, y: number): number {
    if (!this.inBody(x, y)) return -1;
    const row = this.laneAt(y);
    if (row === null) return -1;
    const { trace } = this;
    const lane = trace.lanes[row.role]!;
    if (!lane.used) return -1;
    const [from, to] = [lane.edges[0]!, lane.edges[lane.edges.length - 1]!];
    const time = this.timeAt(view, x);
    const reach = (3 * view.span) / this.body.width;
    let best = -1;
    let nearest = Infinity;
    for (let r = trace.firstAfter(lane, row.worker, time); r < trace.workerOffsets[row.worker + 1]!; r++) {
      if (lane.search[r]! > time + reach) break;
      if (from[r]! < 0 || (row.subrow >= 0 && lane.subrow !== null && lane.subrow[r] !== row.subrow)) continue;
      const distance = Math.max(from[r]! - time, time - to[r]!, 0);
      if (distance < nearest && distance <= reach) {
        nearest = distance;
        best = r;
      }
    }
    return best;
  }

  private consumerRow(record: number): LaneRow {
    const subrow = this.trace.lanes[CONSUMER]!.subrow?.[record] ?? 0;
    const lanes = this.rows.lanes(this.trace.worker[record]!);
    return lanes.find((l) => l.role === CONSUMER && (l.subrow < 0 || l.subrow === subrow)) ?? lanes[0]!;
  }

  /** Middle of a record's consumer lane on the canvas. */
  middleOf(record: number): number {
    const row = this.consumerRow(record);
    return this.body.top + row.top + row.height / 2 - this.scroll;
  }

  /** Where the line of the critical path goes through a record: below its name. */
  pathOf(record: number): number {
    const row = this.consumerRow(record);
    return this.body.top + row.top + row.height * (row.height >= 16 ? 0.86 : 0.5) - this.scroll;
  }
}
