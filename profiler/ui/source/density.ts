/**
 * Rows of workers that are too low to be told apart become a picture of densities.
 *
 * A pixel is a rectangle of time and workers. Its colour is the mean of what lies in that rectangle, each colour by
 * its share of the area and the background by the idle rest: a box filter. Nothing is sampled, so no pattern appears
 * that is not in the trace, whatever the height of a row.
 */

/** Rows lower than this (CSS pixels) are drawn as densities. */
export const DENSE_BELOW = 6;

/**
 * Stretch `count` rows of pixels with alpha, `height` pixels each and the first one from `top`, over `lines` lines of
 * opaque pixels. `height` and `top` need not be whole.
 */
export function stretch(
  rows: Uint32Array,
  first: number,
  count: number,
  width: number,
  top: number,
  height: number,
  lines: number,
  background: readonly [number, number, number],
): Uint32Array {
  const [r0, g0, b0] = background;
  const opaque = new Uint32Array(width * count);
  for (let i = 0, at = first * width; i < opaque.length; i++, at++) {
    const colour = rows[at]!;
    const a = (colour >>> 24) / 255;
    const red = r0 + ((colour & 255) - r0) * a + 0.5;
    const green = g0 + (((colour >>> 8) & 255) - g0) * a + 0.5;
    const blue = b0 + (((colour >>> 16) & 255) - b0) * a + 0.5;
    opaque[i] = (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  }
  const ground = (0xff000000 | (b0 << 16) | (g0 << 8) | r0) >>> 0;
  const out = new Uint32Array(width * lines).fill(ground);
  const sums = new Float32Array(3 * width);
  for (let y = 0; y < lines; y++) {
    const from = (y - top) / height;
    const to = (y + 1 - top) / height;
    const low = Math.max(0, Math.floor(from + 1e-6));
    const high = Math.min(count, Math.ceil(to - 1e-6));
    if (high <= low) continue;
    if (high === low + 1 && from > low - 1e-6 && to < high + 1e-6) {
      out.set(opaque.subarray(low * width, high * width), y * width);
      continue;
    }
    sums.fill(0);
    let rest = 1;
    for (let k = low; k < high; k++) {
      const part = (Math.min(to, k + 1) - Math.max(from, k)) * height;
      rest -= part;
      for (let x = 0, i = k * width; x < width; x++, i++) {
        const colour = opaque[i]!;
        sums[3 * x]! += part * (colour & 255);
        sums[3 * x + 1]! += part * ((colour >>> 8) & 255);
        sums[3 * x + 2]! += part * ((colour >>> 16) & 255);
      }
    }
    rest = Math.max(0, rest);
    for (let x = 0; x < width; x++) {
      const red = sums[3 * x]! + rest * r0 + 0.5;
      const green = sums[3 * x + 1]! + rest * g0 + 0.5;
      const blue = sums[3 * x + 2]! + rest * b0 + 0.5;
      out[y * width + x] = (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
    }
  }
  return out;
}
