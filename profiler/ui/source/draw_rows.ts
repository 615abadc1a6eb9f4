/** Draws the rows of a pane: pixels of the raster stretched to the height of lanes, hatching, names. */

import { DIM, type Theme } from "./colour.ts";
import { DENSE_BELOW, Stretcher } from "./density.ts";
import type { Pane } from "./pane.ts";
import type { WideSegment } from "./raster.ts";
import { CONSUMER, ROLES, WAIT_WORDS } from "./roles.ts";
import type { LaneRow } from "./rows.ts";
import type { Trace } from "./trace.ts";
import type { View } from "./view.ts";

const HATCH_FROM = 5;
const NAME_FROM = 30;
const HATCH_WIDTHS = [5, 8, 12, 20, 40, 80];
const MAX_HATCHED = 6000;
const MAX_NAMED = 1500;
export const FONT = "11px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

export class RowPainter {
  private readonly texture = document.createElement("canvas");
  private readonly stretcher = new Stretcher();
  private pixels = new Uint32Array(0);
  private hatch: CanvasPattern | null = null;
  private hatchTheme: Theme | null = null;
  private hatchRatio = 1;

  /** Draw into a canvas of `ratio` device pixels per CSS pixel. */
  draw(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme, ratio: number): void {
    const { body, rows, scroll, trace } = pane;
    const width = Math.max(1, Math.round(body.width * ratio));
    const left = Math.round(body.left * ratio);
    const lanes: LaneRow[] = [];
    const first = rows.workerAt(scroll);
    const shownEnd = scroll + Math.min(body.height, rows.height);
    for (let worker = first; worker < trace.workers && rows.top(worker) < shownEnd; worker++) {
      for (const lane of rows.lanes(worker)) lanes.push(lane);
    }

    if (this.pixels.length < width * lanes.length) this.pixels = new Uint32Array(width * lanes.length);
    const size = width * lanes.length;
    this.pixels.fill(0, 0, size);
    const step = view.span / width;
    const begin = view.begin + pane.origin;
    const wide: { lane: LaneRow; segments: WideSegment[] }[] = [];
    lanes.forEach((lane, i) => {
      const segments: WideSegment[] | null = lane.height >= DENSE_BELOW ? [] : null;
      pane.raster.paint(lane, begin, step, this.pixels, i * width, width, segments, HATCH_FROM * ratio);
      if (segments !== null && segments.length > 0) wide.push({ lane, segments });
    });

    const { texture } = this;
    if (texture.width !== width) texture.width = width;
    if (texture.height < lanes.length) texture.height = lanes.length + 32;
    const context = texture.getContext("2d");
    if (context === null || lanes.length === 0) return;
    const image = new ImageData(new Uint8ClampedArray(this.pixels.buffer, 0, 4 * size), width, lanes.length);
    context.putImageData(image, 0, 0);

    ctx.save();
    ctx.beginPath();
    ctx.rect(left, Math.round(body.top * ratio), width, Math.round(body.height * ratio));
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const deviceY = (y: number): number => Math.round((body.top + y - scroll) * ratio);
    const clip = [Math.round(body.top * ratio), Math.round((body.top + body.height) * ratio)] as const;
    // Neighbours of equal height are one picture.
    for (let i = 0; i < lanes.length; ) {
      const height = lanes[i]!.height;
      if (isDense(lanes[i]!)) {
        let n = 1;
        while (i + n < lanes.length && isDense(lanes[i + n]!) && Math.abs(lanes[i + n]!.height - height) < 1e-6) n++;
        const from = (body.top + lanes[i]!.top - scroll) * ratio;
        this.drawDense(ctx, i, n, width, left, from, height * ratio, clip, theme);
        i += n;
        continue;
      }
      const top = deviceY(lanes[i]!.top);
      const exact = Number.isInteger(height * ratio);
      let n = 1;
      while (
        exact &&
        i + n < lanes.length &&
        lanes[i + n]!.height === height &&
        lanes[i + n]!.top === lanes[i]!.top + n * height
      ) {
        n++;
      }
      const bottom = deviceY(lanes[i]!.top + n * height);
      ctx.drawImage(texture, 0, i, width, n, left, top, width, bottom - top);
      i += n;
    }
    // Rows stay apart where they are tall enough.
    ctx.fillStyle = theme.row;
    for (const lane of lanes) {
      if (!isDense(lane) && lane.height >= 3.5) ctx.fillRect(left, deviceY(lane.top + lane.height) - 1, width, 1);
    }
    this.drawHatching(ctx, wide, left, deviceY, theme, pane.painting.codes, ratio);
    this.drawNames(ctx, pane, wide, left, deviceY, theme, ratio);
    ctx.restore();
    this.drawGutter(ctx, pane, theme, ratio);
  }

  /** Rows as densities, within the lines of `clip`. */
  private drawDense(
    ctx: CanvasRenderingContext2D,
    first: number,
    count: number,
    width: number,
    left: number,
    top: number,
    height: number,
    clip: readonly [number, number],
    theme: Theme,
  ): void {
    const y = Math.floor(top);
    const lines = Math.ceil(top + count * height - 1e-6) - y;
    const image = this.stretcher.stretch(this.pixels, first, count, width, top - y, height, lines, theme.background);
    const low = Math.max(0, clip[0] - y);
    const high = Math.min(lines, clip[1] - y);
    if (high > low) ctx.putImageData(image, left, y, 0, low, width, high - low);
  }

  private drawHatching(
    ctx: CanvasRenderingContext2D,
    wide: readonly { lane: LaneRow; segments: readonly WideSegment[] }[],
    left: number,
    deviceY: (y: number) => number,
    theme: Theme,
    codes: Uint8Array,
    ratio: number,
  ): void {
    if (this.hatch === null || this.hatchTheme !== theme || this.hatchRatio !== ratio) {
      this.hatch = makeHatch(ctx, theme.hatch, ratio);
      this.hatchTheme = theme;
      this.hatchRatio = ratio;
    }
    if (this.hatch === null) return;
    // All segments of at least a width, so few that a frame has the time.
    const widths = HATCH_WIDTHS.map(() => 0);
    const eachWait = (use: (lane: LaneRow, x0: number, x1: number) => void): void => {
      for (const { lane, segments } of wide) {
        if (lane.role !== CONSUMER) continue;
        for (const { record, segment, x0, x1 } of segments) {
          if (segment <= WAIT_WORDS && (codes[record]! & DIM) === 0) use(lane, x0, x1);
        }
      }
    };
    eachWait((_, x0, x1) => HATCH_WIDTHS.forEach((w, i) => (widths[i]! += x1 - x0 >= w ? 1 : 0)));
    const least = HATCH_WIDTHS.find((_, i) => widths[i]! <= MAX_HATCHED);
    if (least === undefined) return;
    ctx.fillStyle = this.hatch;
    eachWait((lane, x0, x1) => {
      if (x1 - x0 < least) return;
      const top = deviceY(lane.top);
      const height = deviceY(lane.top + lane.height) - top - 1;
      const from = Math.max(0, x0);
      ctx.fillRect(left + from, top, Math.min(x1, ctx.canvas.width) - from, height);
    });
  }

  private drawNames(
    ctx: CanvasRenderingContext2D,
    pane: Pane,
    wide: readonly { lane: LaneRow; segments: readonly WideSegment[] }[],
    left: number,
    deviceY: (y: number) => number,
    theme: Theme,
    ratio: number,
  ): void {
    ctx.font = FONT.replace("11px", `${Math.round(11 * ratio)}px`);
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    let count = 0;
    for (const { lane, segments } of wide) {
      if (lane.height < 11) continue;
      const y = Math.round((deviceY(lane.top) + deviceY(lane.top + lane.height)) / 2);
      for (let i = 0; i < segments.length; i++) {
        const { record, segment, x0 } = segments[i]!;
        const isWait = lane.role === CONSUMER && segment <= WAIT_WORDS;
        if (lane.role !== CONSUMER && segment > 0) continue;
        // What is not waiting has one name.
        while (!isWait && segments[i + 1]?.record === record) i++;
        const from = Math.max(0, x0);
        const room = Math.min(segments[i]!.x1, pane.body.width * ratio) - from - 6 * ratio;
        if (room < NAME_FROM * ratio || ++count > MAX_NAMED) continue;
        const dim = (pane.painting.codes[record]! & DIM) !== 0;
        ctx.fillStyle = dim || (isWait && !pane.painting.strong) ? theme.faint : theme.onSpan;
        const label = pane.trace.labelOf(record);
        let shown = fit(ctx, isWait ? "wait" : label, room);
        // The layer is the first to go.
        if (!isWait && shown !== label) shown = fit(ctx, pane.trace.phases[pane.trace.phase[record]!]!, room);
        if (shown) ctx.fillText(shown, left + from + 3 * ratio, y);
      }
    }
  }

  /** Names of workers and roles beside the rows. */
  private drawGutter(ctx: CanvasRenderingContext2D, pane: Pane, theme: Theme, ratio: number): void {
    const { body, rows, scroll, trace } = pane;
    const right = body.left - 6;
    const top = body.top;
    const bottom = top + Math.min(body.height, rows.height - scroll);
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, Math.round(top * ratio), Math.round(body.left * ratio), Math.round((bottom - top) * ratio));
    ctx.clip();
    ctx.font = FONT.replace("11px", `${Math.round(11 * ratio)}px`);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.max(1, niceStep(15 / rows.rowHeight));
    const name = (text: string, y: number, colour: string): void => {
      ctx.fillStyle = colour;
      ctx.fillText(text, Math.round(right * ratio), Math.round(y * ratio));
    };
    this.drawRanks(ctx, pane, theme, ratio);
    const firstOpen = new Set(rows.openWorkers);
    for (let w = rows.workerAt(scroll); w < trace.workers && pane.yOf(w) < bottom; w++) {
      if (rows.isOpen(w)) {
        ctx.textAlign = "left";
        ctx.fillStyle = theme.text;
        ctx.fillText(`▾ ${trace.workerName(w)}`, Math.round(6 * ratio), Math.round(middleOf(pane, w) * ratio));
        ctx.textAlign = "right";
        let before = -1;
        for (const lane of rows.lanes(w)) {
          if (lane.role === before) continue;
          before = lane.role;
          const same = rows.lanes(w).filter((l) => l.role === lane.role);
          const height = same.reduce((sum, l) => sum + l.height, 0);
          if (height >= 9) name(ROLES[lane.role], body.top + lane.top + height / 2 - scroll, theme.faint);
        }
        if (isFirstOfRank(trace, w)) continue;
        ctx.fillStyle = theme.line;
        ctx.fillRect(0, Math.round(pane.yOf(w) * ratio), Math.round(body.left * ratio), 1);
      } else if (trace.workerOfRank(w) % every === 0 && !firstOpen.has(w - 1)) {
        const height = rows.bottom(w) - rows.top(w);
        if (every > 1 && pane.yOf(w) + 10 > bottom) continue;
        // Not over the line above the next rank.
        if (every > 1 && nextRank(trace, w) < w + 13 / rows.rowHeight) continue;
        // Not over the names of an open worker's roles.
        if (every > 1 && rows.openWorkers.some((open) => open > w && rows.top(open) - rows.top(w) < 13)) continue;
        name(trace.workerName(w), pane.yOf(w) + Math.max(height / 2, every > 1 ? 6 : 0), theme.faint);
      }
    }
    ctx.restore();
  }

  /** A line above the first worker of each rank, and the rank's name in the margin. */
  private drawRanks(ctx: CanvasRenderingContext2D, pane: Pane, theme: Theme, ratio: number): void {
    const { body, rows, trace } = pane;
    for (let w = 0; trace.ranks > 1 && w < trace.workers; w++) {
      if (!isFirstOfRank(trace, w)) continue;
      const top = Math.round(pane.yOf(w) * ratio);
      ctx.fillStyle = theme.text;
      ctx.fillRect(0, top, Math.round(body.left * ratio), Math.max(1, Math.round(ratio)));
      ctx.textAlign = "left";
      // Above the name of a worker whose roles have names.
      const y = rows.isOpen(w) ? middleOf(pane, w) - 14 : pane.yOf(w) + 8;
      ctx.fillText(`rank ${trace.rankOf(w)}`, Math.round(6 * ratio), Math.round(y * ratio));
      ctx.textAlign = "right";
    }
  }
}

/** Where the middle of a worker's row is. */
function middleOf(pane: Pane, worker: number): number {
  return pane.yOf(worker) + (pane.rows.bottom(worker) - pane.rows.top(worker)) / 2;
}

/** Whether a worker is the first of its rank, and there are several. */
function isFirstOfRank(trace: Trace, worker: number): boolean {
  const rank = trace.rankOf(worker);
  return trace.ranks > 1 && rank !== undefined && rank !== trace.rankOf(worker - 1);
}

/** The first worker of the rank after that of a worker; Infinity behind the last. */
function nextRank(trace: Trace, worker: number): number {
  const next = worker - trace.workerOfRank(worker) + trace.workersPerRank;
  return next < trace.workers ? next : Infinity;
}

/** Rows of workers, not lanes of roles, when they are low. */
function isDense(lane: LaneRow): boolean {
  return lane.role === CONSUMER && lane.subrow < 0 && lane.height < DENSE_BELOW;
}

/** The smallest of 1, 2, 5, 10, 20 ... that is not below a value. */
export function niceStep(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= value * 0.999) return factor * power;
  return 10 * power;
}

const widths = new Map<string, number>();

/** As much of a text as fits, with an ellipsis; empty when that is nothing. */
export function fit(ctx: CanvasRenderingContext2D, text: string, room: number): string {
  const key = ctx.font + text;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size > 20000) widths.clear();
    widths.set(key, (width = ctx.measureText(text).width));
  }
  if (width <= room) return text;
  const letters = Math.floor((text.length * room) / width) - 1;
  return letters < 3 ? "" : `${text.slice(0, letters)}…`;
}

function makeHatch(ctx: CanvasRenderingContext2D, colour: string, ratio: number): CanvasPattern | null {
  const tile = document.createElement("canvas");
  const size = Math.max(6, Math.round(6 * ratio));
  tile.width = tile.height = size;
  const inner = tile.getContext("2d");
  if (inner === null) return null;
  inner.strokeStyle = colour;
  inner.scale(size / 6, size / 6);
  inner.lineWidth = 1.4;
  inner.beginPath();
  for (const shift of [-6, 0, 6]) {
    inner.moveTo(shift - 1, 7);
    inner.lineTo(shift + 7, -1);
  }
  inner.stroke();
  return ctx.createPattern(tile, "repeat");
}
