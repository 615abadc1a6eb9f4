/** The two canvases: one with the picture of the view, one above it with what follows the pointer. */

import type { Theme } from "./colour.ts";
import {
  type Arrows,
  type Range,
  drawArrows,
  drawCursor,
  drawMatches,
  drawPath,
  drawRange,
  outline,
} from "./draw_overlay.ts";
import { BandPainter } from "./draw_band.ts";
import { RowPainter } from "./draw_rows.ts";
import {
  drawBandwidth,
  drawOverview,
  drawOverviewWindow,
  drawRuler,
  drawStates,
  drawSteps,
} from "./draw_tracks.ts";
import type { Box, Pane } from "./pane.ts";
import type { View } from "./view.ts";

export const GUTTER = 104;
const OVERVIEW_HEIGHT = 34;
const RULER_HEIGHT = 40;

/** What is on the stage. */
export interface Scene {
  readonly panes: readonly Pane[];
  readonly view: View;
  readonly theme: Theme;
  readonly critical: boolean;
  readonly range: Range | null;
  readonly selected: { readonly pane: Pane; readonly record: number; readonly arrows: Arrows } | null;
  readonly hovered: { readonly pane: Pane; readonly record: number } | null;
  readonly cursor: number | null;
}

export class Stage {
  readonly picture = document.createElement("canvas");
  readonly overlay = document.createElement("canvas");
  overviewBox: Box = { left: GUTTER, top: 0, width: 1, height: OVERVIEW_HEIGHT };
  rulerBox: Box = { left: GUTTER, top: OVERVIEW_HEIGHT, width: 1, height: RULER_HEIGHT };
  private readonly bandPainter = new BandPainter();
  private readonly rowPainter = new RowPainter();
  private readonly overview = document.createElement("canvas");
  private overviewOf: readonly unknown[] = [];
  private ratio = 1;
  width = 1;
  height = 1;

  constructor(readonly element: HTMLElement) {
    this.picture.className = "picture";
    this.overlay.className = "overlay";
    this.overlay.tabIndex = 0;
    this.overlay.setAttribute("role", "img");
    this.overlay.setAttribute("aria-label", "timeline of workers; press ? for its keys");
    element.append(this.picture, this.overlay);
  }

  /** Take the size of the element and place the panes. */
  resize(panes: readonly Pane[]): void {
    const { clientWidth, clientHeight } = this.element;
    this.width = Math.max(200, clientWidth);
    this.height = Math.max(150, clientHeight);
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    for (const canvas of [this.picture, this.overlay]) {
      const [w, h] = [Math.round(this.width * this.ratio), Math.round(this.height * this.ratio)];
      if (canvas.width !== w) canvas.width = w;
      if (canvas.height !== h) canvas.height = h;
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
    }
    const inner = this.width - GUTTER;
    this.overviewBox = { left: GUTTER, top: 0, width: inner, height: OVERVIEW_HEIGHT };
    this.rulerBox = { left: GUTTER, top: OVERVIEW_HEIGHT, width: inner, height: RULER_HEIGHT };
    const top = OVERVIEW_HEIGHT + RULER_HEIGHT;
    const each = (this.height - top) / Math.max(1, panes.length);
    panes.forEach((pane, i) => {
      const box = { left: 0, top: Math.round(top + i * each), width: this.width, height: Math.round(each) - 4 };
      pane.place(box, GUTTER, panes.length > 1);
    });
    this.overviewOf = [];
  }

  draw(scene: Scene): void {
    const ctx = this.picture.getContext("2d", { alpha: false });
    const { panes, view, theme } = scene;
    const main = panes[0];
    if (ctx === null || main === undefined) return;
    const { ratio } = this;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.fillStyle = theme.row;
    ctx.fillRect(0, 0, this.picture.width, this.picture.height);
    for (const pane of panes) this.rowPainter.draw(ctx, pane, view, theme, ratio);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawOverview(ctx, scene, main);
    drawRuler(ctx, this.rulerBox, view, theme, panes.length > 1 ? "from step begin" : "from first event");
    const ceiling = Math.max(...panes.map((pane) => pane.bandwidthCeiling));
    for (const pane of panes) {
      if (pane.title.height > 0) drawTitle(ctx, pane, theme);
      this.bandPainter.draw(ctx, pane, view, theme, ratio);
      drawBandwidth(ctx, pane, view, theme, ceiling);
      drawStates(ctx, pane, view, theme);
      drawSteps(ctx, pane, view, theme, pane === main ? this.rulerBox : null);
    }
    ctx.fillStyle = theme.line;
    for (const { bandwidth, body } of panes) {
      ctx.fillRect(GUTTER - 1, bandwidth.top, 1, body.top + body.height - bandwidth.top);
    }
    this.drawOverlay(scene);
  }

  private drawOverview(ctx: CanvasRenderingContext2D, scene: Scene, main: Pane): void {
    const { view, theme } = scene;
    const state = [main, theme, ...view.limits, main.origin];
    if (state.some((value, i) => value !== this.overviewOf[i])) {
      this.overviewOf = state;
      this.overview.width = Math.round(this.width * this.ratio);
      this.overview.height = Math.round(OVERVIEW_HEIGHT * this.ratio);
      const inner = this.overview.getContext("2d");
      inner?.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      if (inner) drawOverview(inner, this.overviewBox, main, view, theme);
    }
    ctx.drawImage(this.overview, 0, 0, this.width, OVERVIEW_HEIGHT);
    drawOverviewWindow(ctx, this.overviewBox, view, theme);
  }

  drawOverlay(scene: Scene): void {
    const ctx = this.overlay.getContext("2d");
    if (ctx === null) return;
    const { panes, view, theme } = scene;
    ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    ctx.clearRect(0, 0, this.width, this.height);
    if (scene.cursor !== null) drawCursor(ctx, scene.cursor, this.height, theme);
    for (const pane of panes) drawMatches(ctx, pane, view, theme);
    if (scene.range !== null && panes.includes(scene.range.pane)) drawRange(ctx, view, theme, scene.range);
    if (scene.critical) for (const pane of panes) drawPath(ctx, pane, view, theme);
    if (scene.selected !== null) {
      const { pane, record, arrows } = scene.selected;
      drawArrows(ctx, pane, view, theme, arrows);
      outline(ctx, pane, view, record, theme.text, 2);
    }
    if (scene.hovered !== null) {
      outline(ctx, scene.hovered.pane, view, scene.hovered.record, theme.accent, 1.5);
    }
  }
}

function drawTitle(ctx: CanvasRenderingContext2D, pane: Pane, theme: Theme): void {
  const { title, trace } = pane;
  ctx.fillStyle = theme.band;
  ctx.fillRect(0, title.top, title.left + title.width, title.height);
  ctx.font = "bold 11px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  ctx.fillStyle = theme.text;
  const step = trace.stepNumber[pane.step];
  const text = `${pane.letter}   ${trace.name}   ·   aligned at step ${step}`;
  ctx.fillText(text, 8, title.top + title.height / 2 + 0.5);
}
