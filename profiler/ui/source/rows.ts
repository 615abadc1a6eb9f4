/** Where the rows of workers lie: one bar each, or a lane for every role. */

import { CONSUMER, type Role } from "./roles.ts";
import type { LaneKey } from "./raster.ts";
import type { Trace } from "./trace.ts";

export interface LaneRow extends LaneKey {
  /** Pixels below the top of all rows. */
  readonly top: number;
  readonly height: number;
}

const OPEN_HEIGHT = 88;
export const MAX_ROW = 160;
/** Rows at least this tall show the roles. */
const LANES_FROM = 46;
/** Shares of an open row's height: for each row of overlapping spans of a role. */
const SHARES = [0.55, 0.85, 1.7, 0.6];

export class Rows {
  rowHeight = 6;
  private readonly open = new Set<number>();
  private tops: Float64Array;

  constructor(private readonly trace: Trace) {
    this.tops = new Float64Array(trace.workers + 1);
    this.measure();
  }

  private measure(): void {
    for (let w = 0; w < this.trace.workers; w++) this.tops[w + 1] = this.tops[w]! + this.heightOf(w);
  }

  private heightOf(worker: number): number {
    return this.open.has(worker) ? Math.max(OPEN_HEIGHT, this.rowHeight) : this.rowHeight;
  }

  get height(): number {
    return this.tops[this.trace.workers]!;
  }

  get openWorkers(): readonly number[] {
    return [...this.open].sort((a, b) => a - b);
  }

  setRowHeight(height: number): void {
    this.rowHeight = Math.max(1, Math.min(MAX_ROW, height));
    this.measure();
  }

  isOpen(worker: number): boolean {
    return this.open.has(worker) || this.rowHeight >= LANES_FROM;
  }

  toggle(worker: number, open = !this.open.has(worker)): void {
    if (open) this.open.add(worker);
    else this.open.delete(worker);
    this.measure();
  }

  closeAll(): void {
    this.open.clear();
    this.measure();
  }

  top(worker: number): number {
    return this.tops[worker]!;
  }

  bottom(worker: number): number {
    return this.tops[worker + 1]!;
  }

  /** The worker at a height; the nearest one outside. */
  workerAt(y: number): number {
    let low = 0;
    let high = this.trace.workers - 1;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.tops[middle + 1]! <= y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The lanes of a worker, from top to bottom. */
  lanes(worker: number): LaneRow[] {
    const top = this.tops[worker]!;
    const height = this.tops[worker + 1]! - top;
    if (!this.isOpen(worker)) {
      return [{ worker, role: CONSUMER, subrow: -1, top, height }];
    }
    const shares: { role: Role; subrow: number; share: number }[] = [];
    this.trace.lanes.forEach((lane, role) => {
      if (!lane.used) return;
      for (let subrow = 0; subrow < lane.depth; subrow++) {
        shares.push({ role: role as Role, subrow, share: SHARES[role]! / (1 + 0.35 * (lane.depth - 1)) });
      }
    });
    const sum = shares.reduce((total, s) => total + s.share, 0) || 1;
    const inner = height - 3;
    let at = top + 1;
    return shares.map(({ role, subrow, share }) => {
      const lane = { worker, role, subrow, top: Math.round(at), height: 0 };
      at += (inner * share) / sum;
      return { ...lane, height: Math.max(1, Math.round(at) - lane.top) };
    });
  }
}
