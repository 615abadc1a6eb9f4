/** Draws what changes without the view: hover, selection, dependency arrows, critical path, the selected range. */

import type { Theme } from "./colour.ts";
import { doneAt, incomingOf, inputsAt, outgoingOf } from "./dependencies.ts";
import { FONT } from "./draw_rows.ts";
import { duration } from "./format.ts";
import type { Pane } from "./pane.ts";
import { firstFrom } from "./query.ts";
import { CONSUMER } from "./roles.ts";
import type { View } from "./view.ts";

const MAX_ARROWS = 400;

/** A selected part of a pane: times of its trace, and workers. */
export interface Range {
  readonly pane: Pane;
  readonly begin: number;
  readonly end: number;
  readonly workers: readonly [number, number];
}

interface Arrow {
  readonly from: number;
  readonly to: number;
  readonly tagged: boolean;
}

/** Arrows of a selected record. They are looked up once per selection. */
export interface Arrows {
  readonly incoming: readonly Arrow[];
  readonly outgoing: readonly Arrow[];
  /** What came last: the cause. */
  readonly cause: Arrow | null;
}

export function arrowsOf(pane: Pane, record: number): Arrows {
  const { trace } = pane;
  const incoming: Arrow[] = [];
  for (const wait of incomingOf(trace, record)) {
    for (const from of wait.producers) incoming.push({ from, to: record, tagged: wait.tagged });
  }
  const outgoing: Arrow[] = [];
  for (const signal of outgoingOf(trace, record)) {
    for (const to of signal.consumers) outgoing.push({ from: record, to, tagged: signal.tagged });
  }
  const from = trace.cause[record]!;
  const channel = trace.causeChannel[record]!;
  const tagged = channel < 0 || trace.programOf(record).channelKind[channel] === 1;
  return { incoming, outgoing, cause: from < 0 ? null : { from, to: record, tagged } };
}

function clipBody(ctx: CanvasRenderingContext2D, pane: Pane): void {
  const { body } = pane;
  ctx.beginPath();
  ctx.rect(body.left, body.top, body.width, body.height);
  ctx.clip();
}

function drawArrow(ctx: CanvasRenderingContext2D, pane: Pane, view: View, arrow: Arrow, head: boolean): void {
  const { trace } = pane;
  const x0 = pane.xOf(view, doneAt(trace, arrow.from, arrow.tagged));
  const x1 = pane.xOf(view, inputsAt(trace, arrow.to));
  const y0 = pane.middleOf(arrow.from);
  const y1 = pane.middleOf(arrow.to);
  const bend = Math.max(12, Math.min(80, Math.abs(x1 - x0) * 0.5));
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  ctx.stroke();
  if (!head) return;
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x1 - 8, y1 - 4);
  ctx.lineTo(x1 - 8, y1 + 4);
  ctx.closePath();
  ctx.fill();
}

export function drawArrows(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme, arrows: Arrows): void {
  ctx.save();
  clipBody(ctx, pane);
  ctx.lineWidth = 1;
  const many = arrows.incoming.length + arrows.outgoing.length > 40;
  ctx.globalAlpha = many ? 0.28 : 0.65;
  ctx.strokeStyle = theme.dark ? "#8fb7ff" : "#2f62c9";
  for (const arrow of arrows.incoming.slice(0, MAX_ARROWS)) drawArrow(ctx, pane, view, arrow, false);
  ctx.strokeStyle = theme.dark ? "#7fd3a6" : "#17824a";
  for (const arrow of arrows.outgoing.slice(0, MAX_ARROWS)) drawArrow(ctx, pane, view, arrow, false);
  ctx.globalAlpha = 1;
  if (arrows.cause !== null) {
    ctx.lineWidth = 4.5;
    ctx.strokeStyle = theme.row;
    drawArrow(ctx, pane, view, arrows.cause, false);
    ctx.lineWidth = 2.25;
    ctx.strokeStyle = ctx.fillStyle = theme.path;
    drawArrow(ctx, pane, view, arrows.cause, true);
  }
  ctx.restore();
}

/** The rectangles of a record in its lanes, or in that of the consumers alone. */
export function outline(
  ctx: CanvasRenderingContext2D,
  pane: Pane,
  view: View,
  record: number,
  colour: string,
  width: number,
  alone = false,
): void {
  const { trace, rows, body, scroll } = pane;
  const worker = trace.worker[record]!;
  ctx.save();
  clipBody(ctx, pane);
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  for (const row of rows.lanes(worker)) {
    const lane = trace.lanes[row.role]!;
    if (!lane.used || (row.subrow >= 0 && lane.subrow !== null && lane.subrow[record] !== row.subrow)) continue;
    if (alone && row.role !== CONSUMER) continue;
    const from = lane.edges[0]![record]!;
    if (from < 0) continue;
    const x0 = pane.xOf(view, from);
    const x1 = pane.xOf(view, lane.edges[lane.edges.length - 1]![record]!);
    if (x1 < body.left || x0 > body.left + body.width) continue;
    const top = body.top + row.top - scroll;
    const left = Math.max(x0, body.left - 4);
    const right = Math.min(Math.max(x1, x0 + 2), body.left + body.width + 4);
    const grow = row.role === CONSUMER ? width / 2 : 0;
    ctx.strokeRect(left - grow, top - grow, right - left + 2 * grow, Math.max(2, row.height - 1) + 2 * grow);
  }
  ctx.restore();
}

/** The critical path of a step: its records outlined and joined. */
export function drawPath(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme): void {
  const path = pane.causes.path(pane.step);
  const { trace, body } = pane;
  ctx.save();
  clipBody(ctx, pane);
  for (const [colour, width] of [
    [theme.row, 4],
    [theme.path, 1.75],
  ] as const) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.lineJoin = "round";
    ctx.beginPath();
    let started = false;
    for (const { record } of path) {
      const x0 = pane.xOf(view, inputsAt(trace, record));
      const x1 = pane.xOf(view, doneAt(trace, record, false));
      const y = pane.pathOf(record);
      if (started) ctx.lineTo(x0, y);
      else ctx.moveTo(x0, y);
      ctx.lineTo(x1, y);
      started = true;
    }
    ctx.stroke();
  }
  ctx.restore();
  for (const { record } of path) {
    const [from, to] = trace.span(record);
    const x = pane.xOf(view, from);
    if (pane.xOf(view, to) - x > 3 && x < body.left + body.width) outline(ctx, pane, view, record, theme.path, 1.5, true);
  }
}

export function drawRange(ctx: CanvasRenderingContext2D, view: View, theme: Theme, range: Range): void {
  const { pane } = range;
  const { body, trace } = pane;
  const x0 = Math.max(body.left, pane.xOf(view, range.begin));
  const x1 = Math.min(body.left + body.width, pane.xOf(view, range.end));
  if (x1 <= x0) return;
  const whole = range.workers[0] === 0 && range.workers[1] === trace.workers;
  const bottom = body.top + Math.min(body.height, pane.rows.height - pane.scroll);
  const top = whole ? pane.bandwidth.top : Math.max(body.top, pane.yOf(range.workers[0]));
  const end = whole ? bottom : Math.min(bottom, body.top + pane.rows.bottom(range.workers[1] - 1) - pane.scroll);
  if (end <= top) return;
  ctx.fillStyle = theme.dark ? "rgba(98, 168, 255, 0.14)" : "rgba(11, 98, 214, 0.10)";
  ctx.fillRect(x0, top, x1 - x0, end - top);
  ctx.fillStyle = theme.accent;
  ctx.fillRect(x0, top, 1, end - top);
  ctx.fillRect(x1 - 1, top, 1, end - top);
  const text = duration(range.end - range.begin);
  ctx.font = FONT;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const width = ctx.measureText(text).width + 12;
  const x = Math.max(body.left + width / 2, Math.min(body.left + body.width - width / 2, (x0 + x1) / 2));
  ctx.fillRect(x - width / 2, top, width, 16);
  ctx.fillStyle = theme.dark ? "#08111f" : "#ffffff";
  ctx.fillText(text, x, top + 8.5);
}

/** A line under the pointer through everything, with the time. */
export function drawCursor(ctx: CanvasRenderingContext2D, x: number, height: number, theme: Theme): void {
  ctx.fillStyle = theme.strong;
  ctx.globalAlpha = 0.8;
  ctx.fillRect(Math.round(x), 0, 1, height);
  ctx.globalAlpha = 1;
}

/** Where a search found something, as ticks below the ruler. */
export function drawMatches(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme): void {
  if (pane.matches === null) return;
  const { body } = pane;
  const { begins } = pane.matches;
  const begin = view.begin + pane.origin;
  const pixel = view.span / body.width;
  const top = pane.states.top + pane.states.height;
  ctx.fillStyle = theme.accent;
  // One tick per pixel: from a match to the first one of the pixels after it.
  for (let i = firstFrom(begins, begin); i < begins.length; ) {
    const x = Math.floor((begins[i]! - begin) / pixel);
    if (x >= body.width) break;
    ctx.fillRect(body.left + x, top, 1, 4);
    i = Math.max(i + 1, firstFrom(begins, begin + (x + 1) * pixel));
  }
}
