/** Draws the names of layers and phases over time. Pieces narrower than a pixel add up to its mean colour. */

import { type Rgb, type Theme, colourOfName, css, mix, pack } from "./colour.ts";
import { FONT, fit } from "./draw_rows.ts";
import type { Box, Pane } from "./pane.ts";
import { type Piece, pieceAfter } from "./phases.ts";
import { fill } from "./raster.ts";
import type { View } from "./view.ts";

const NAME_FROM = 16;

export class BandPainter {
  private readonly strip = document.createElement("canvas");

  /** Coordinates on the canvas are CSS pixels; the context is scaled by `ratio`. */
  draw(ctx: CanvasRenderingContext2D, pane: Pane, view: View, theme: Theme, ratio: number): void {
    const { layerBand, phaseBand, phases } = pane;
    const parity: readonly Rgb[] = theme.dark ? [[52, 60, 73], [74, 84, 99]] : [[222, 228, 236], [196, 205, 216]];
    if (layerBand.height > 0) {
      const colour = (piece: Piece): Rgb => parity[Number(piece.short) % 2]!;
      this.line(ctx, layerBand, phases.layers, pane, view, theme, ratio, colour, theme.text);
    }
    this.line(ctx, phaseBand, phases.phases, pane, view, theme, ratio, (p) => colourOfName(p.short), theme.onSpan);
    ctx.textAlign = "right";
    ctx.fillStyle = theme.text;
    const name = (box: Box, text: string): void => ctx.fillText(text, box.left - 6, box.top + box.height / 2 + 0.5);
    if (layerBand.height > 0) name(layerBand, "layers");
    name(phaseBand, "phases");
  }

  private line(
    ctx: CanvasRenderingContext2D,
    box: Box,
    pieces: readonly Piece[],
    pane: Pane,
    view: View,
    theme: Theme,
    ratio: number,
    colour: (piece: Piece) => Rgb,
    text: string,
  ): void {
    const width = Math.max(1, Math.round(box.width * ratio));
    const begin = view.begin + pane.origin;
    const scale = width / view.span;
    const row = new Uint32Array(width);
    const named: { piece: Piece; x0: number; x1: number }[] = [];
    for (let i = pieceAfter(pieces, begin); i < pieces.length; i++) {
      const piece = pieces[i]!;
      const x0 = (piece.begin - begin) * scale;
      if (x0 >= width) break;
      const x1 = (piece.end - begin) * scale;
      const wide = x1 - x0 > 4 * ratio;
      fill(row, 0, width, x0, wide ? x1 - ratio : x1, pack(colour(piece)));
      if (x1 - x0 >= NAME_FROM * ratio) named.push({ piece, x0: Math.max(0, x0) / ratio, x1: Math.min(width, x1) / ratio });
    }
    this.strip.width = width;
    this.strip.height = 1;
    this.strip.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(row.buffer), width, 1), 0, 0);
    ctx.fillStyle = css(mix(theme.background, theme.dark ? [255, 255, 255] : [0, 0, 0], 0.03));
    ctx.fillRect(box.left, box.top, box.width, box.height);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.strip, box.left, box.top, box.width, box.height - 1);
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillStyle = text;
    for (const { piece, x0, x1 } of named) {
      const room = x1 - x0 - 6;
      // The layer of a phase stands above it, so its own name is enough; a layer's number is the last to go.
      const whole = pieces === pane.phases.layers ? piece.name : piece.short;
      const shown = ctx.measureText(whole).width <= room ? whole : pieces === pane.phases.layers ? piece.short : fit(ctx, whole, room);
      if (shown && ctx.measureText(shown).width <= room + 2) ctx.fillText(shown, box.left + x0 + 3, box.top + box.height / 2);
    }
  }
}
