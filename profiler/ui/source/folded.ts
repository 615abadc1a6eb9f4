/** All layers of like steps laid upon each other: the mean layer, and how far layers differ from it. */

import { groupOf, pieceAfter, type Phases, type Piece } from "./phases.ts";
import type { Trace } from "./trace.ts";

/** A distribution of times, ns. */
export interface Spread {
  readonly mean: number;
  readonly p10: number;
  readonly p90: number;
}

export interface FoldedPhase {
  readonly name: string;
  /** Since the layer began, mean over layers. */
  readonly begin: number;
  readonly length: Spread;
  /** How many layers have it. */
  readonly count: number;
}

export interface FoldedLayer {
  readonly name: string;
  readonly length: Spread;
}

export interface Folded {
  /** Layers and steps that were folded. */
  readonly count: number;
  readonly steps: number;
  readonly length: Spread;
  readonly phases: readonly FoldedPhase[];
  /** Each layer by itself, over steps, in order. */
  readonly layers: readonly FoldedLayer[];
}

/** Mean, and percentiles between which values are interpolated, as numpy does. */
export function spread(values: readonly number[]): Spread {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (part: number): number => {
    const place = part * (sorted.length - 1);
    const low = Math.floor(place);
    return sorted[low]! + (place - low) * ((sorted[low + 1] ?? sorted[low]!) - sorted[low]!);
  };
  return { mean: sorted.reduce((a, b) => a + b, 0) / sorted.length, p10: at(0.1), p90: at(0.9) };
}

/** What repeats most in a program: "layer" where there are layers. */
function mostFrequent(layers: readonly Piece[]): string {
  const counts = new Map<string, number>();
  for (const { name } of layers) {
    const word = name.replace(/ \d+$/, "");
    counts.set(word, (counts.get(word) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";
}

/** Fold the layers of all steps with the program and the rows of one; null: nothing in it repeats. */
export function fold(trace: Trace, { phases, layers }: Phases, step: number): Folded | null {
  const like = (s: number): boolean =>
    trace.stepProgram[s] === trace.stepProgram[step] && trace.stepTokens[s] === trace.stepTokens[step];
  const candidates = layers.filter((piece) => like(piece.step));
  const word = mostFrequent(candidates);
  const chosen = candidates.filter((piece) => piece.name.startsWith(`${word} `));
  if (chosen.length < 2) return null;
  const byPhase = new Map<string, { begins: number[]; lengths: number[] }>();
  const byLayer = new Map<string, number[]>();
  for (const layer of chosen) {
    push(byLayer, layer.name, layer.end - layer.begin);
    const parts = new Map<string, { begin: number; length: number }>();
    for (let i = pieceAfter(phases, layer.begin); i < phases.length && phases[i]!.begin < layer.end; i++) {
      const { begin, end, short, name, step: s } = phases[i]!;
      if (s !== layer.step || groupOf(name)?.name !== layer.name) continue;
      const part = parts.get(short);
      if (part === undefined) parts.set(short, { begin: begin - layer.begin, length: end - begin });
      else part.length += end - begin;
    }
    for (const [short, { begin, length }] of parts) {
      let entry = byPhase.get(short);
      if (entry === undefined) byPhase.set(short, (entry = { begins: [], lengths: [] }));
      entry.begins.push(begin);
      entry.lengths.push(length);
    }
  }
  return {
    count: chosen.length,
    steps: new Set(chosen.map((piece) => piece.step)).size,
    length: spread(chosen.map((piece) => piece.end - piece.begin)),
    phases: [...byPhase]
      .map(([name, { begins, lengths }]) => ({ name, begin: spread(begins).mean, length: spread(lengths), count: begins.length }))
      .sort((a, b) => a.begin - b.begin),
    layers: [...byLayer].map(([name, lengths]) => ({ name, length: spread(lengths) })),
  };
}

function push(map: Map<string, number[]>, key: string, value: number): void {
  const list = map.get(key);
  if (list === undefined) map.set(key, [value]);
  else list.push(value);
}
