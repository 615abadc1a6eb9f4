/** Draws what lies above the rows: the overview of the whole trace, the ruler, bandwidth and states over time. */

import { STACK } from "./activity.ts";
import { type Theme, css, mix } from "./colour.ts";
import { FONT, niceStep } from "./draw_rows.ts";
import { duration, rate } from "./format.ts";
import type { Box, Pane } from "./pane.ts";
import { IDLE, LOADING, STATES } from "./roles.ts";
import type { View } from "./view.ts";

/** Least pixels between the lines of steps. */
const LINE_SPACE = 10;
/** Pixels from the end of a step's name to the line of the next step that is named. */
const STEP_SPACE = 10;

/** Coordinates on the canvas are CSS pixels here; the context is scaled. `origin` says what time 0 is. */
export function drawRuler(ctx: CanvasRenderingContext2D, box: Box, view: View, theme: Theme, origin: string): void {
  ctx.fillStyle = theme.band;
  ctx.fillRect(0, box.top, box.left + box.width, box.height);
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  const step = niceStep((view.span / box.width) * 110);
  const first = Math.ceil(view.begin / step) * step;
  for (let time = first; time < view.end; time += step) {
    const x = Math.round(box.left + ((time - view.begin) / view.span) * box.width) + 0.5;
    if (x < box.left) continue;
    ctx.strokeStyle = theme.strong;
    ctx.beginPath();
    ctx.moveTo(x, box.top + box.height - 7);
    ctx.lineTo(x, box.top + box.height);
    ctx.stroke();
    ctx.fillStyle = theme.text;
    const text = tickText(time, step, view);
    if (x + 4 + ctx.measureText(text).width < box.left + box.width) ctx.fillText(text, x + 4, box.top + 10);
  }
  ctx.fillStyle = theme.line;
  ctx.fillRect(0, box.top + box.height - 1, box.left + box.width, 1);
  gutterText(ctx, box, theme, "time", origin);
}

function tickText(time: number, step: number, view: View): string {
  const size = Math.max(Math.abs(view.begin), Math.abs(view.end));
  const [unit, name] = size >= 1e6 && step >= 1e4 ? [1e6, "ms"] : size >= 1e3 && step >= 1 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
  return `${((time === 0 ? 0 : time) / unit).toFixed(Math.min(digits, 4))} ${name}`;
}

/** Lines where steps begin, through all tracks and rows of a pane, as far as there is room for them. */
export function drawSteps(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme, ruler: Box | null): void {
  const { trace, body } = pane;
  const begin = view.begin + pane.origin;
  const end = view.end + pane.origin;
  const bottom = body.top + Math.min(body.height, pane.rows.height);
  let labelled = -Infinity;
  let lined = -Infinity;
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  // Every, every second, fifth, tenth ... step is named and has a line, as there is room.
  const pitch = ((trace.end / Math.max(1, trace.steps)) * body.width) / view.span;
  const every = niceStep(Math.max(1, 60 / pitch));
  const lines = niceStep(Math.max(1, LINE_SPACE / pitch));
  for (let s = trace.stepAt(begin); s < trace.steps && trace.stepBegin[s]! < end; s++) {
    const x = Math.round(pane.xOf(view, trace.stepBegin[s]!));
    if (x >= body.left && ((trace.stepNumber[s]! % lines === 0 && x >= lined + LINE_SPACE) || s === pane.step)) {
      lined = x;
      ctx.fillStyle = theme.strong;
      ctx.fillRect(x, pane.bandwidth.top, 1, bottom - pane.bandwidth.top);
    }
    if (ruler === null) continue;
    const at = Math.max(body.left, x);
    const text = `step ${trace.stepNumber[s]}`;
    const wanted = trace.stepNumber[s]! % every === 0 || x < body.left || s === pane.step;
    const width = ctx.measureText(text).width;
    if (!wanted || at < labelled || at + width + 4 > body.left + body.width) continue;
    // Not over the name of the step that is looked at, and a step that is almost over not in place of the next one.
    const next = s < pane.step ? pane.step : x < body.left ? s + 1 : trace.steps;
    if (pane.xOf(view, trace.stepBegin[next] ?? Infinity) < at + width + STEP_SPACE) continue;
    ctx.fillStyle = s === pane.step ? theme.accent : theme.faint;
    ctx.fillText(text, at + 4, ruler.top + ruler.height - 9);
    labelled = at + width + STEP_SPACE;
  }
}

export function drawBandwidth(
  ctx: CanvasRenderingContext2D,
  pane: Pane,
  view: View,
  theme: Theme,
  ceiling: number,
): void {
  const box = pane.bandwidth;
  const columns = Math.max(1, Math.floor(box.width));
  const { bandwidth } = pane.activity.sample(view.begin + pane.origin, view.end + pane.origin, columns);
  const limit = pane.trace.machine.bandwidth;
  const scale = box.height / (ceiling * 1.12);
  const floor = box.top + box.height;
  ctx.fillStyle = theme.band;
  ctx.fillRect(box.left, box.top, box.width, box.height);
  ctx.beginPath();
  ctx.moveTo(box.left, floor);
  for (let i = 0; i < columns; i++) {
    const y = Math.max(box.top, floor - bandwidth[i]! * scale);
    ctx.lineTo(box.left + i, y);
    ctx.lineTo(box.left + i + 1, y);
  }
  ctx.lineTo(box.left + columns, floor);
  ctx.closePath();
  ctx.fillStyle = css(mix(theme.states[LOADING], theme.background, 0.2));
  ctx.fill();
  if (limit !== null) {
    const y = Math.round(floor - limit * scale) + 0.5;
    ctx.strokeStyle = theme.path;
    ctx.setLineDash([5, 4]);
    ctx.beginPath();
    ctx.moveTo(box.left, y);
    ctx.lineTo(box.left + box.width, y);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  gutterText(ctx, box, theme, "bandwidth", limit === null ? `to ${rate(ceiling)}` : `of ${rate(limit)}`);
}

export function drawStates(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme): void {
  const box = pane.states;
  const columns = Math.max(1, Math.floor(box.width));
  const { states } = pane.activity.sample(view.begin + pane.origin, view.end + pane.origin, columns);
  const scale = box.height / pane.trace.workers;
  ctx.fillStyle = css(theme.states[IDLE]);
  ctx.fillRect(box.left, box.top, box.width, box.height);
  const level = new Float64Array(columns).fill(box.top + box.height);
  for (const state of STACK) {
    ctx.fillStyle = css(theme.states[state]);
    ctx.beginPath();
    for (let i = 0; i < columns; i++) ctx.lineTo(box.left + i, level[i]!), ctx.lineTo(box.left + i + 1, level[i]!);
    for (let i = columns - 1; i >= 0; i--) {
      level[i] = level[i]! - states[state]![i]! * scale;
      ctx.lineTo(box.left + i + 1, level[i]!);
      ctx.lineTo(box.left + i, level[i]!);
    }
    ctx.fill();
  }
  gutterText(ctx, box, theme, "workers", String(pane.trace.workers));
}

function gutterText(ctx: CanvasRenderingContext2D, box: Box, theme: Theme, title: string, detail: string): void {
  ctx.font = FONT;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = theme.text;
  ctx.fillText(title, box.left - 6, box.top + 9);
  ctx.fillStyle = theme.faint;
  if (box.height >= 28) ctx.fillText(detail, box.left - 6, box.top + 23);
}

/** The whole trace in a strip, with the view as a window in it. */
export function drawOverview(ctx: CanvasRenderingContext2D, box: Box, pane: Pane, view: View, theme: Theme): void {
  const [low, high] = view.limits;
  const columns = Math.max(1, Math.floor(box.width));
  const { states } = pane.activity.sample(low + pane.origin, high + pane.origin, columns);
  const scale = (box.height - 6) / pane.trace.workers;
  const floor = box.top + box.height - 3;
  ctx.fillStyle = theme.band;
  ctx.fillRect(0, box.top, box.left + box.width, box.height);
  for (let i = 0; i < columns; i++) {
    let y = floor;
    for (const state of STACK) {
      const height = states[state]![i]! * scale;
      if (height < 0.1) continue;
      ctx.fillStyle = css(theme.states[state]);
      ctx.fillRect(box.left + i, y - height, 1, height);
      y -= height;
    }
  }
  ctx.font = FONT;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = theme.faint;
  ctx.fillText(duration(high - low), box.left - 6, box.top + box.height / 2);
}

export function drawOverviewWindow(ctx: CanvasRenderingContext2D, box: Box, view: View, theme: Theme): void {
  const [low, high] = view.limits;
  const xOf = (time: number): number =>
    box.left + Math.max(0, Math.min(1, (time - low) / (high - low))) * box.width;
  const [x0, x1] = [xOf(view.begin), xOf(view.end)];
  ctx.fillStyle = theme.dark ? "rgba(10, 13, 18, 0.62)" : "rgba(240, 243, 247, 0.74)";
  ctx.fillRect(box.left, box.top, x0 - box.left, box.height);
  ctx.fillRect(x1, box.top, box.left + box.width - x1, box.height);
  ctx.strokeStyle = theme.accent;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(x0, box.top + 0.75, Math.max(2, x1 - x0), box.height - 1.5);
  ctx.lineWidth = 1;
}

/** What the states track shows around a time, for the tooltip. */
export function statesAt(pane: Pane, time: number, half: number): { name: string; workers: number }[] {
  const { states } = pane.activity.sample(time - half, time + half, 1);
  const counts = states.map((s) => s[0]!);
  const idle = pane.trace.workers - counts.reduce((a, b) => a + b, 0);
  return STATES.map((name, i) => ({ name, workers: Math.max(0, counts[i] ?? idle) }));
}
