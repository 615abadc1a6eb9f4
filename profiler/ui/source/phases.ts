/**
 * What a step is busy with over time: its phases, and the layers that they belong to, without overlap.
 *
 * A phase of a step begins when half of its instructions have their inputs, and ends where the next one begins.
 * Workers that are ahead or behind do not move it.
 */

import { CONSUMER } from "./roles.ts";
import type { Trace } from "./trace.ts";

/** A part of a step. Pieces are in order of time. */
export interface Piece {
  readonly begin: number;
  readonly end: number;
  readonly step: number;
  /** What it is called: a label of the program, or "layer 3". */
  readonly name: string;
  /** The phase of a label; of a layer its number as text. */
  readonly short: string;
}

/** What repeats in a program, with its number: "layer 3" of "layers.3.down_proj", "blocks 3" of "blocks.3.mlp". */
export function groupOf(label: string): { name: string; number: number } | null {
  const found = /(?:^|[.\u2068])(layers)\.(\d{1,6})(?:\.|$)/.exec(label) ?? /(?:^|[.\u2068])([A-Za-z_]+)\.(\d{1,6})\./.exec(label);
  if (found === null) return null;
  const what = found[1] === "layers" ? "layer" : found[1]!;
  return { name: `${what} ${found[2]}`, number: Number(found[2]) };
}

export class Phases {
  readonly phases: readonly Piece[];
  /** Empty when nothing in the program repeats. */
  readonly layers: readonly Piece[];

  constructor(trace: Trace) {
    const phases: Piece[] = [];
    for (let s = 0; s < trace.steps; s++) addStep(trace, s, phases);
    this.phases = phases;
    this.layers = joinLayers(phases);
  }
}

function addStep(trace: Trace, step: number, out: Piece[]): void {
  const inputs = trace.lanes[CONSUMER]!.edges[2]!;
  const found = new Map<string, { times: number[]; short: string }>();
  for (let i = trace.stepOffsets[step]!; i < trace.stepOffsets[step + 1]!; i++) {
    const record = trace.byFile[i]!;
    if (inputs[record]! < 0) continue;
    const label = trace.labelOf(record);
    const name = label || trace.kindOf(record);
    let entry = found.get(name);
    if (entry === undefined) {
      entry = { times: [], short: label ? trace.phases[trace.phase[record]!]! : name };
      found.set(name, entry);
    }
    entry.times.push(inputs[record]!);
  }
  const order = [...found].map(([name, { times, short }]) => ({ name, short, begin: median(times) }));
  order.sort((a, b) => a.begin - b.begin);
  let end = trace.stepEnd[step]!;
  const pieces: Piece[] = [];
  order.reverse().forEach(({ name, short, begin }, i) => {
    const from = i === order.length - 1 ? trace.stepBegin[step]! : Math.min(begin, end);
    pieces.push({ begin: from, end, step, name, short });
    end = from;
  });
  out.push(...pieces.reverse());
}

function median(times: number[]): number {
  return times.sort((a, b) => a - b)[times.length >> 1]!;
}

function joinLayers(phases: readonly Piece[]): Piece[] {
  const layers: Piece[] = [];
  for (const { begin, end, step, name } of phases) {
    const group = groupOf(name);
    if (group === null) continue;
    const last = layers[layers.length - 1];
    if (last !== undefined && last.name === group.name && last.step === step && last.end === begin) {
      layers[layers.length - 1] = { ...last, end };
    } else {
      layers.push({ begin, end, step, name: group.name, short: String(group.number) });
    }
  }
  return layers;
}

/** The first piece that ends after a time. */
export function pieceAfter(pieces: readonly Piece[], time: number): number {
  let low = 0;
  let high = pieces.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (pieces[middle]!.end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
