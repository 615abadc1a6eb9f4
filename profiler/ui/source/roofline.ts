/** A roofline: what every kind of instruction reaches, against what the memory gives. */

import { colourOfName, css } from "./colour.ts";
import { flops, rate } from "./format.ts";
import type { Kind } from "./summary.ts";

/** The namespace of SVG; the page names no address, so that it is plain that it calls none. */
const SPACE = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstElementChild!.namespaceURI;
const [WIDTH, HEIGHT] = [420, 190];
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 10, 8, 30];
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
  return value >= 1000 ? `${value / 1000}k` : value >= 0.001 ? String(Number(value.toPrecision(1))) : value.toExponential(0);
}

/** A dot per kind, as large as its part of the time; `ceiling` in GB/s. Kinds without operations are not in it. */
export function makeRoofline(all: readonly Kind[], ceiling: number | null): SVGElement | null {
  const drawn = (value: number): boolean => value > LEAST && value < MOST;
  const kinds = all.filter((k) => drawn(k.flopsPerByte) && drawn(k.flops));
  if (kinds.length === 0) return null;
  const xs = decades(Math.min(...kinds.map((k) => k.flopsPerByte)), Math.max(...kinds.map((k) => k.flopsPerByte)) * 1.01);
  const reach = kinds.map((k) => k.flops);
  const ys = decades(Math.min(...reach), Math.max(...reach) * 1.01);
  const scale = (marks: number[], from: number, to: number) => (value: number): number => {
    const [low, high] = [Math.log10(marks[0]!), Math.log10(marks[marks.length - 1]!)];
    return from + ((Math.log10(value) - low) / (high - low)) * (to - from);
  };
  const x = scale(xs, LEFT, WIDTH - RIGHT);
  const y = scale(ys, HEIGHT - BOTTOM, TOP);
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "roofline", role: "img" });
  picture.append(shape("title", {}, "GFLOP/s over FLOP per byte, by kind of instruction"));
  for (const mark of xs) {
    picture.append(
      shape("line", { x1: x(mark), x2: x(mark), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }),
      shape("text", { x: x(mark), y: HEIGHT - BOTTOM + 12, "text-anchor": "middle" }, short(mark)),
    );
  }
  for (const mark of ys) {
    picture.append(
      shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark), y2: y(mark), class: "grid" }),
      shape("text", { x: LEFT - 4, y: y(mark) + 4, "text-anchor": "end" }, short(mark)),
    );
  }
  picture.append(
    shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "FLOP per byte"),
    shape("text", { x: LEFT + 3, y: TOP + 9 }, "GFLOP/s"),
  );
  if (ceiling !== null) picture.append(...roof(xs, ys, x, y, ceiling));
  picture.append(...dots(kinds, x, y));
  return picture;
}

/** The line of the memory's bandwidth, cut at the edges of the picture. */
function roof(
  xs: readonly number[],
  ys: readonly number[],
  x: (value: number) => number,
  y: (value: number) => number,
  ceiling: number,
): SVGElement[] {
  const from = Math.max(xs[0]!, ys[0]! / ceiling);
  const to = Math.min(xs[xs.length - 1]!, ys[ys.length - 1]! / ceiling);
  if (from >= to) return [];
  const line = shape("line", { x1: x(from), y1: y(from * ceiling), x2: x(to), y2: y(to * ceiling), class: "roof" });
  line.append(shape("title", {}, `${rate(ceiling)}: what a plain sum reads`));
  return [line];
}

function dots(kinds: readonly Kind[], x: (value: number) => number, y: (value: number) => number): SVGElement[] {
  const most = Math.max(...kinds.map((k) => k.total), 1);
  // The largest first: small ones lie upon them.
  const order = [...kinds].sort((a, b) => b.total - a.total);
  return order.map((kind) => {
    const radius = 3 + 6 * Math.sqrt(kind.total / most);
    const dot = shape("circle", { cx: x(kind.flopsPerByte), cy: y(kind.flops), r: radius, fill: css(colourOfName(kind.name)) });
    dot.append(shape("title", {}, `${kind.name}: ${flops(kind.flops)}, ${rate(kind.bytes)}, ${kind.flopsPerByte.toFixed(2)} FLOP per byte`));
    return dot;
  });
}
