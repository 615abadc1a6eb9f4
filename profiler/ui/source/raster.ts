/**
 * Paints lanes as rows of pixels.
 *
 * A lane is one role of one worker (or one row of overlapping spans of it). Its pixels come from the spans
 * themselves where few are in view, and from a pyramid of means where many are: bins that halve in number from
 * level to level. So the time that a picture takes depends on its pixels, not on the spans of the trace.
 */

import type { Painting } from "./colour.ts";
import { type Role, SEGMENTS } from "./roles.ts";
import type { Trace } from "./trace.ts";

const MIN_BINS = 256;
const MAX_BINS = 1 << 16;
const BINS_PER_SPAN = 4;

export interface LaneKey {
  readonly worker: number;
  readonly role: Role;
  /** Which of the overlapping rows; -1: all of them. */
  readonly subrow: number;
}

/** A segment that is wide enough to be hatched or to carry a name. */
export interface WideSegment {
  readonly record: number;
  readonly segment: number;
  readonly x0: number;
  readonly x1: number;
}

interface Pyramid {
  readonly levels: readonly Uint32Array[];
  /** Width of the bins of level 0. */
  readonly bin: number;
}

/** Mean of two colours by their coverage (alpha). */
function join(a: number, b: number): number {
  if (a === b) return a;
  const wa = a >>> 24;
  const wb = b >>> 24;
  const sum = wa + wb;
  if (sum === 0) return 0;
  const red = ((a & 255) * wa + (b & 255) * wb) / sum;
  const green = (((a >>> 8) & 255) * wa + ((b >>> 8) & 255) * wb) / sum;
  const blue = (((a >>> 16) & 255) * wa + ((b >>> 16) & 255) * wb) / sum;
  return ((((sum + 1) >>> 1) << 24) | ((blue + 0.5) << 16) | ((green + 0.5) << 8) | (red + 0.5)) >>> 0;
}

/** Adds a colour that covers `part` of a pixel. */
function blend(row: Uint32Array, at: number, colour: number, part: number): void {
  const before = row[at]!;
  const wa = before >>> 24;
  const wb = Math.min(part * 255, 255 - wa);
  if (wb <= 0) return;
  const sum = wa + wb;
  if (wa === 0) {
    row[at] = ((colour & 0xffffff) | (Math.round(wb) << 24)) >>> 0;
    return;
  }
  const red = ((before & 255) * wa + (colour & 255) * wb) / sum;
  const green = (((before >>> 8) & 255) * wa + ((colour >>> 8) & 255) * wb) / sum;
  const blue = (((before >>> 16) & 255) * wa + ((colour >>> 16) & 255) * wb) / sum;
  row[at] = ((Math.round(sum) << 24) | ((blue + 0.5) << 16) | ((green + 0.5) << 8) | (red + 0.5)) >>> 0;
}

/** Adds a colour from x0 to x1 to `width` pixels from `start`; pixels that it covers in part become a mean. */
export function fill(row: Uint32Array, start: number, width: number, x0: number, x1: number, colour: number): void {
  if (!(x1 > 0) || x0 >= width || !(x1 > x0)) return;
  if (x0 < 0) x0 = 0;
  if (x1 > width) x1 = width;
  const i0 = Math.floor(x0);
  const i1 = Math.floor(x1);
  if (i0 === i1) {
    blend(row, start + i0, colour, x1 - x0);
    return;
  }
  let first = i0;
  if (x0 > i0) {
    blend(row, start + i0, colour, i0 + 1 - x0);
    first++;
  }
  if (i1 > first) row.fill(colour, start + first, start + i1);
  if (x1 > i1) blend(row, start + i1, colour, x1 - i1);
}

export class Raster {
  private readonly pyramids = new Map<string, Pyramid>();

  constructor(
    readonly trace: Trace,
    readonly painting: Painting,
  ) {}

  /**
   * Paint a lane's pixels, from time `begin`, `step` ns a pixel, into `row` at `start`. Wide segments are appended to
   * `wide` unless that is null.
   */
  paint(
    lane: LaneKey,
    begin: number,
    step: number,
    row: Uint32Array,
    start: number,
    width: number,
    wide: WideSegment[] | null,
    wideLimit: number,
  ): void {
    if (!this.trace.lanes[lane.role]!.used) return;
    const spans = this.trace.workerOffsets[lane.worker + 1]! - this.trace.workerOffsets[lane.worker]!;
    if (spans === 0) return;
    if (step > (2 * this.trace.end) / binCount(spans)) this.fromPyramid(lane, begin, step, row, start, width);
    else this.fromSpans(lane, begin, step, row, start, width, wide, wideLimit);
  }

  private fromSpans(
    { worker, role, subrow }: LaneKey,
    begin: number,
    step: number,
    row: Uint32Array,
    start: number,
    width: number,
    wide: WideSegment[] | null,
    wideLimit: number,
  ): void {
    const lane = this.trace.lanes[role]!;
    const { edges } = lane;
    const shades = SEGMENTS[role]!;
    const tables = shades.map((shade) => this.painting.tables[role]![shade]!);
    const { codes } = this.painting;
    const subrows = subrow < 0 ? null : lane.subrow;
    const last = this.trace.workerOffsets[worker + 1]!;
    const end = begin + step * width;
    const scale = 1 / step;
    const segments = shades.length;
    for (let r = this.trace.firstAfter(lane, worker, begin); r < last; r++) {
      if (lane.search[r]! >= end) break;
      if (subrows !== null && subrows[r] !== subrow) continue;
      let from = edges[0]![r]!;
      if (from < 0) continue;
      const total = (edges[segments]![r]! - from) * scale;
      // Neighbours stay apart when there is room and the rows are thick.
      const space = wide !== null && total > 3 ? 1 : 0;
      let x0 = (from - begin) * scale;
      for (let s = 0; s < segments; s++) {
        const to = edges[s + 1]![r]!;
        if (to === from) continue;
        const x1 = (to - begin) * scale;
        const right = s === segments - 1 || edges[segments]![r] === to ? Math.max(x0, x1 - space) : x1;
        fill(row, start, width, x0, right, tables[s]![codes[r]!]!);
        if (wide !== null && right - x0 >= wideLimit && right > 0) wide.push({ record: r, segment: s, x0, x1: right });
        x0 = x1;
        from = to;
      }
    }
  }

  private fromPyramid(
    lane: LaneKey,
    begin: number,
    step: number,
    row: Uint32Array,
    start: number,
    width: number,
  ): void {
    const { levels, bin } = this.pyramid(lane);
    // Four to eight bins a pixel; those on its edges count by their part, or equal patterns would beat with pixels.
    let number = 0;
    while (number + 1 < levels.length && bin * 2 ** (number + 1) <= step / 4) number++;
    const level = levels[number]!;
    const size = level.length;
    const scale = 1 / (bin * 2 ** number);
    for (let x = 0; x < width; x++) {
      const from = Math.max(0, (begin + x * step) * scale);
      const to = Math.min(size, (begin + (x + 1) * step) * scale);
      if (to <= from) continue;
      const count = step * scale;
      let weight = 0;
      let red = 0;
      let green = 0;
      let blue = 0;
      for (let i = Math.floor(from); i < to; i++) {
        const colour = level[i]!;
        const alpha = (colour >>> 24) * (Math.min(to, i + 1) - Math.max(from, i));
        weight += alpha;
        red += (colour & 255) * alpha;
        green += ((colour >>> 8) & 255) * alpha;
        blue += ((colour >>> 16) & 255) * alpha;
      }
      if (weight === 0) continue;
      const one = 1 / weight;
      row[start + x] =
        (((weight / count + 0.5) << 24) | ((blue * one + 0.5) << 16) | ((green * one + 0.5) << 8) | (red * one + 0.5)) >>> 0;
    }
  }

  private pyramid(lane: LaneKey): Pyramid {
    const key = `${lane.worker}:${lane.role}:${lane.subrow}`;
    let found = this.pyramids.get(key);
    if (found === undefined) {
      const spans = this.trace.workerOffsets[lane.worker + 1]! - this.trace.workerOffsets[lane.worker]!;
      const size = binCount(spans);
      const bin = this.trace.end / size;
      const levels = [new Uint32Array(size)];
      this.fromSpans(lane, 0, bin, levels[0]!, 0, size, null, 0);
      for (let below = levels[0]!; below.length > MIN_BINS; ) {
        const level = new Uint32Array(below.length / 2);
        for (let i = 0; i < level.length; i++) level[i] = join(below[2 * i]!, below[2 * i + 1]!);
        levels.push(level);
        below = level;
      }
      found = { levels, bin };
      this.pyramids.set(key, found);
    }
    return found;
  }
}

function binCount(spans: number): number {
  let size = MIN_BINS;
  while (size < MAX_BINS && size < BINS_PER_SPAN * spans) size *= 2;
  return size;
}
