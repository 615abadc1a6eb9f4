/**
 * Rows of workers that are too low to be told apart become a picture of densities.
 *
 * A pixel is a rectangle of time and workers. Its colour is the mean of what lies in that rectangle, each colour by
 * its share of the area and the background by the idle rest: a box filter. Nothing is sampled, so no pattern appears
 * that is not in the trace, whatever the height of a row.
 */

/** Rows lower than this (CSS pixels) are drawn as densities. */
export const DENSE_BELOW = 6;

/** Colours of pixels upon a background: what is not covered is the background. */
function lay(rows: Uint32Array, first: number, out: Uint32Array, size: number, ground: number): void {
  const [r0, g0, b0] = [ground & 255, (ground >>> 8) & 255, (ground >>> 16) & 255];
  for (let i = 0, at = first; i < size; i++, at++) {
    const colour = rows[at]!;
    const alpha = colour >>> 24;
    if (alpha === 255) out[i] = colour;
    else if (alpha === 0) out[i] = ground;
    else {
      const a = alpha / 255;
      const red = r0 + ((colour & 255) - r0) * a + 0.5;
      const green = g0 + (((colour >>> 8) & 255) - g0) * a + 0.5;
      const blue = b0 + (((colour >>> 16) & 255) - b0) * a + 0.5;
      out[i] = 0xff000000 | (blue << 16) | (green << 8) | red;
    }
  }
}

/** Makes pictures of densities; it keeps its memory from picture to picture. */
export class Stretcher {
  private opaque = new Uint32Array(0);
  private sums = new Float32Array(0);
  private image: ImageData | null = null;

  /**
   * Stretch `count` rows of pixels with alpha, `height` pixels each and the first one from `top`, over `lines` lines
   * of opaque pixels. `height` and `top` need not be whole. The picture is valid until the next call.
   */
  stretch(
    rows: Uint32Array,
    first: number,
    count: number,
    width: number,
    top: number,
    height: number,
    lines: number,
    background: readonly [number, number, number],
  ): ImageData {
    const ground = (0xff000000 | (background[2] << 16) | (background[1] << 8) | background[0]) >>> 0;
    if (this.opaque.length < width * count) this.opaque = new Uint32Array(width * count);
    if (this.sums.length !== 3 * width) this.sums = new Float32Array(3 * width);
    if (this.image === null || this.image.width !== width || this.image.height !== lines) {
      this.image = new ImageData(width, lines);
    }
    const { opaque, sums, image } = this;
    lay(rows, first * width, opaque, width * count, ground);
    const out = new Uint32Array(image.data.buffer);
    for (let y = 0; y < lines; y++) {
      const from = (y - top) / height;
      const to = (y + 1 - top) / height;
      const low = Math.max(0, Math.floor(from + 1e-6));
      const high = Math.min(count, Math.ceil(to - 1e-6));
      if (high <= low) {
        out.fill(ground, y * width, (y + 1) * width);
      } else if (high === low + 1 && from > low - 1e-6 && to < high + 1e-6) {
        out.set(opaque.subarray(low * width, high * width), y * width);
      } else {
        let rest = 1;
        sums.fill(0.5);
        for (let k = low; k < high; k++) {
          const part = (Math.min(to, k + 1) - Math.max(from, k)) * height;
          rest -= part;
          add(sums, opaque, k * width, width, part);
        }
        if (rest > 1e-6) for (let i = 0; i < 3 * width; i++) sums[i]! += rest * background[i % 3]!;
        for (let x = 0, i = y * width; x < width; x++, i++) {
          out[i] = 0xff000000 | (sums[3 * x + 2]! << 16) | (sums[3 * x + 1]! << 8) | sums[3 * x]!;
        }
      }
    }
    return image;
  }
}

function add(sums: Float32Array, pixels: Uint32Array, start: number, width: number, part: number): void {
  for (let x = 0, i = start; x < 3 * width; x += 3, i++) {
    const colour = pixels[i]!;
    sums[x]! += part * (colour & 255);
    sums[x + 1]! += part * ((colour >>> 8) & 255);
    sums[x + 2]! += part * ((colour >>> 16) & 255);
  }
}
