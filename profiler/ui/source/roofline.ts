/** A roofline: what every kind of instruction reaches, against what memory and arithmetic give. */

import { colourOfName, css } from "./colour.ts";
import { flops, rate } from "./format.ts";
import type { Machine } from "./header.ts";
import type { Kind } from "./summary.ts";

/** The namespace of SVG; the page names no address, so that it is plain that it calls none. */
const SPACE = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstElementChild!.namespaceURI;
const [WIDTH, HEIGHT] = [420, 190];
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 18, 14, 30];
/** Rates outside are none. */
const [LEAST, MOST] = [1e-6, 1e9];

function shape(tag: string, attributes: Readonly<Record<string, string | number>>, text = ""): SVGElement {
  const element = document.createElementNS(SPACE, tag) as SVGElement;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.textContent = text;
  return element;
}

/** Powers of ten from the one below a number to the one above another. */
function decades(low: number, high: number): number[] {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return Array.from({ length: Math.max(2, to - from + 1) }, (_, i) => 10 ** (from + i));
}

function short(value: number): string {
  return value >= 0.001 ? String(Number(value.toPrecision(1))) : value.toExponential(0);
}

/** Where values lie in the picture: logarithmic axes from the first to the last mark. */
class Axes {
  constructor(
    readonly xs: readonly number[],
    readonly ys: readonly number[],
  ) {}

  x(value: number): number {
    return place(this.xs, value, LEFT, WIDTH - RIGHT);
  }

  y(value: number): number {
    return place(this.ys, value, HEIGHT - BOTTOM, TOP);
  }
}

function place(marks: readonly number[], value: number, from: number, to: number): number {
  const [low, high] = [Math.log10(marks[0]!), Math.log10(marks[marks.length - 1]!)];
  return from + ((Math.log10(value) - low) / (high - low)) * (to - from);
}

/** A dot per kind, as large as its part of the time, below the machine's roofs. Kinds without operations are not in it. */
export function makeRoofline(all: readonly Kind[], { bandwidth, flops: peak }: Machine): SVGElement | null {
  const drawn = (value: number): boolean => value > LEAST && value < MOST;
  const kinds = all.filter((k) => drawn(k.flopsPerByte) && drawn(k.flops));
  if (kinds.length === 0) return null;
  const corner = bandwidth !== null && peak !== null && drawn(peak) && drawn(peak / bandwidth) ? peak / bandwidth : null;
  const across = [...kinds.map((k) => k.flopsPerByte), ...(corner === null ? [] : [corner])];
  const up = [...kinds.map((k) => k.flops), ...(peak === null || !drawn(peak) ? [] : [peak])];
  const axes = new Axes(
    decades(Math.min(...across), Math.max(...across) * 1.01),
    decades(Math.min(...up), Math.max(...up) * 1.01),
  );
  const { xs, ys } = axes;
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "roofline", role: "img" });
  picture.append(shape("title", {}, "FLOP/s over FLOP per byte, by kind of instruction"));
  for (const mark of xs) {
    const x = axes.x(mark);
    picture.append(
      shape("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }),
      shape("text", { x, y: HEIGHT - BOTTOM + 12, "text-anchor": "middle" }, short(mark)),
    );
  }
  const [unit, name] = ys[ys.length - 1]! > 1e4 ? [1e3, "TFLOP/s"] : [1, "GFLOP/s"];
  for (const mark of ys) {
    const y = axes.y(mark);
    picture.append(
      shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }),
      shape("text", { x: LEFT - 4, y: y + (mark === ys[0] ? 0 : 4), "text-anchor": "end" }, short(mark / unit)),
    );
  }
  picture.append(
    shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "FLOP per byte"),
    shape("text", { x: LEFT + 3, y: TOP + 9 }, name),
  );
  if (bandwidth !== null) picture.append(...memoryRoof(axes, bandwidth, corner));
  if (peak !== null) picture.append(...arithmeticRoof(axes, peak, corner));
  picture.append(...dots(kinds, axes));
  return picture;
}

/** The line of the memory's bandwidth, up to the corner of both roofs and cut at the edges of the picture. */
function memoryRoof(axes: Axes, bandwidth: number, corner: number | null): SVGElement[] {
  const { xs, ys } = axes;
  const from = Math.max(xs[0]!, ys[0]! / bandwidth);
  const to = corner ?? Math.min(xs[xs.length - 1]!, ys[ys.length - 1]! / bandwidth);
  if (from >= to) return [];
  return roof(axes, [from, from * bandwidth], [to, to * bandwidth], rate(bandwidth), "what a plain sum reads");
}

/** The line of the rate of products, from the corner of both roofs on. */
function arithmeticRoof(axes: Axes, peak: number, corner: number | null): SVGElement[] {
  const { xs, ys } = axes;
  if (peak < ys[0]! || peak > ys[ys.length - 1]!) return [];
  return roof(axes, [corner ?? xs[0]!, peak], [xs[xs.length - 1]!, peak], flops(peak), "what a large matrix product does");
}

/** A line between two points (FLOP per byte, GFLOP/s), with its rate written along it. */
function roof(axes: Axes, from: readonly [number, number], to: readonly [number, number], name: string, help: string): SVGElement[] {
  const [x1, y1, x2, y2] = [axes.x(from[0]), axes.y(from[1]), axes.x(to[0]), axes.y(to[1])];
  const line = shape("line", { x1, y1, x2, y2, class: "roof" });
  line.append(shape("title", {}, `${name}: ${help}`));
  const turned = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  const middle = `translate(${(x1 + x2) / 2} ${(y1 + y2) / 2}) rotate(${turned})`;
  return [line, shape("text", { transform: middle, y: -4, "text-anchor": "middle", class: "rate" }, name)];
}

function dots(kinds: readonly Kind[], axes: Axes): SVGElement[] {
  const most = Math.max(...kinds.map((k) => k.total), 1);
  // The largest first: small ones lie upon them.
  const order = [...kinds].sort((a, b) => b.total - a.total);
  return order.map((kind) => {
    const radius = 3 + 6 * Math.sqrt(kind.total / most);
    const place = { cx: axes.x(kind.flopsPerByte), cy: axes.y(kind.flops), r: radius };
    const dot = shape("circle", { ...place, fill: css(colourOfName(kind.name)) });
    dot.append(shape("title", {}, `${kind.name}: ${flops(kind.flops)}, ${rate(kind.bytes)}, ${kind.flopsPerByte.toFixed(2)} FLOP per byte`));
    return dot;
  });
}
