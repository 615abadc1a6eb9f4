/** Numbers about a part of a trace: some workers between two times. */

import { sweepBytes, sweepStates } from "./activity.ts";
import { CONSUMER, FINISH, IDLE, LOAD, ROLES, SHADES, STATES, WAIT_BARRIER, WAIT_WORDS, WORK } from "./roles.ts";
import type { Trace } from "./trace.ts";

export interface Scope {
  readonly begin: number;
  readonly end: number;
  /** First worker, and the one after the last. */
  readonly workers: readonly [number, number];
  /** Only records of this step, and all of their times; -1: what of all records is between begin and end. */
  readonly step: number;
}

export type Grouping = "phase" | "kind" | "label" | "layer" | "worker" | "sm" | "rank";
export const GROUPINGS: readonly Grouping[] = ["phase", "kind", "label", "layer", "worker", "sm", "rank"];

/** Statistics of the records of one group. Times are of the consumers' spans; their parts outside do not count in sums. */
export interface GroupStatistics {
  readonly name: string;
  count: number;
  readonly p50: number;
  readonly p99: number;
  readonly total: number;
  /** Time of the segments, by shade. */
  readonly segments: readonly number[];
  readonly bytes: number;
  readonly flops: number;
}

/** The part of a group's time that is waiting. */
export function waitingPart({ segments, total }: GroupStatistics): number {
  return total > 0 ? (segments[WAIT_BARRIER]! + segments[WAIT_WORDS]!) / total : 0;
}

/** What all workers would reach that did nothing else, per nanosecond: over the time of computing and loading. */
export function ratePerWorkers({ segments }: GroupStatistics, amount: number, workers: number): number {
  const busy = segments[LOAD]! + segments[WORK]! + segments[FINISH]!;
  return busy > 0 ? (amount * workers) / busy : NaN;
}

export interface Statistics {
  readonly duration: number;
  /** The part of the duration in which a step ran: rates, idle time and shares are of it. */
  readonly busy: number;
  readonly workers: number;
  readonly count: number;
  /** Bytes that instructions read and write, and those of them that are streamed (weights, KV): as they arrive. */
  readonly bytes: number;
  readonly streamed: number;
  readonly flops: number;
  /** Worker time in each state. */
  readonly states: readonly number[];
  /** Time of the spans of each role. */
  readonly roles: readonly number[];
  readonly groups: readonly GroupStatistics[];
}

function groupNames(trace: Trace, grouping: Grouping): { of: (r: number) => number; name: (n: number) => string } {
  switch (grouping) {
    case "phase":
      return { of: (r) => trace.phase[r]!, name: (n) => trace.phases[n]! };
    case "kind":
      return { of: (r) => trace.kind[r]!, name: (n) => trace.kinds[n]! };
    case "label":
      return { of: (r) => trace.label[r]!, name: (n) => trace.labels[n]! || "unnamed" };
    case "worker":
      return { of: (r) => trace.worker[r]!, name: (n) => `worker ${trace.workerName(n)}` };
    case "sm":
      return { of: (r) => trace.smPlace(r), name: (n) => `SM ${trace.smPlaceName(n)}` };
    case "rank":
      return { of: (r) => trace.rankOf(trace.worker[r]!) ?? -1, name: (n) => (n < 0 ? "unknown" : `rank ${n}`) };
    case "layer":
      return { of: (r) => trace.layer[r]!, name: (n) => (n < 0 ? "none" : `layer ${n}`) };
  }
}

/** A quantile, between two values in proportion. */
function quantile(sorted: Float64Array, part: number): number {
  if (sorted.length === 0) return 0;
  const place = part * (sorted.length - 1);
  const before = Math.floor(place);
  const [low, high] = [sorted[before]!, sorted[Math.ceil(place)]!];
  return low + (high - low) * (place - before);
}

class Group {
  readonly durations: number[] = [];
  total = 0;
  readonly segments = SHADES.map(() => 0);
  bytes = 0;
  flops = 0;

  finish(name: string): GroupStatistics {
    const sorted = Float64Array.from(this.durations).sort();
    const { total, segments, bytes, flops } = this;
    const [p50, p99] = [quantile(sorted, 0.5), quantile(sorted, 0.99)];
    return { name, count: sorted.length, p50, p99, total, segments, bytes, flops };
  }
}

/** How long a step runs between two times. Steps do not overlap. */
function running(trace: Trace, begin: number, end: number): number {
  let time = 0;
  for (let s = trace.stepAt(begin); s < trace.steps && trace.stepBegin[s]! < end; s++) {
    time += common(trace.stepBegin[s]!, trace.stepEnd[s]!, begin, end);
  }
  return time;
}

/** The length of what [a, b] and [begin, end] have in common. */
function common(a: number, b: number, begin: number, end: number): number {
  return Math.max(0, Math.min(b, end) - Math.max(a, begin));
}

export function measure(trace: Trace, scope: Scope, grouping: Grouping): Statistics {
  const { begin, end, step } = scope;
  const { of, name } = groupNames(trace, grouping);
  const groups = new Map<number, Group>();
  const group = (record: number): Group => {
    const number = of(record);
    let found = groups.get(number);
    if (found === undefined) groups.set(number, (found = new Group()));
    return found;
  };
  const busy = running(trace, begin, end);
  const states = STATES.map(() => 0);
  const roles = ROLES.map(() => 0);
  let count = 0;
  let activations = 0;
  let streamed = 0;
  let flops = 0;
  const consumer = trace.lanes[CONSUMER]!;
  const [low, high] = step < 0 ? [begin, end] : [0, trace.end + 1];
  for (let worker = scope.workers[0]; worker < scope.workers[1]; worker++) {
    let known = 0;
    sweepStates(trace, worker, begin, end, (state, a, b) => {
      states[state]! += b - a;
      known += b - a;
    });
    states[IDLE]! += Math.max(0, busy - known);
    sweepBytes(trace, worker, low, high, (a, b, amount, record) => {
      if (step >= 0 && trace.step[record] !== step) return;
      streamed += step < 0 ? (amount * common(a, b, begin, end)) / (b - a) : amount;
    });
    trace.lanes.forEach((lane, role) => {
      if (!lane.used) return;
      const [from, to] = [lane.edges[0]!, lane.edges[lane.edges.length - 1]!];
      // Spans that overlap count once.
      let over = begin;
      for (let r = trace.firstAfter(lane, worker, begin); r < trace.workerOffsets[worker + 1]!; r++) {
        if (lane.search[r]! >= end) break;
        if (from[r]! < 0) continue;
        roles[role]! += common(Math.max(from[r]!, over), to[r]!, begin, end);
        over = Math.max(over, to[r]!);
      }
    });
    const { edges } = consumer;
    const [from, to] = [edges[0]!, edges[5]!];
    for (let r = trace.firstAfter(consumer, worker, low); r < trace.workerOffsets[worker + 1]!; r++) {
      if (consumer.search[r]! >= high) break;
      // What ends when the range begins is not in it, unless it has no length.
      if (from[r]! < low && to[r]! <= low) continue;
      if (from[r]! < 0 || (step >= 0 && trace.step[r] !== step)) continue;
      const here = group(r);
      const whole = to[r]! - from[r]!;
      const inside = common(from[r]!, to[r]!, low, high);
      const share = whole > 0 ? inside / whole : 1;
      here.durations.push(whole);
      here.total += inside;
      for (const shade of SHADES) {
        here.segments[shade]! += common(edges[shade]![r]!, edges[shade + 1]![r]!, low, high);
      }
      here.bytes += trace.bytes[r]! * share;
      activations += (trace.bytes[r]! - trace.loadBytes[r]!) * share;
      const work = trace.programOf(r).flops[trace.instruction[r]!]! * share;
      here.flops += work;
      flops += work;
      count++;
    }
  }
  return {
    duration: end - begin,
    busy,
    workers: scope.workers[1] - scope.workers[0],
    count,
    bytes: activations + streamed,
    streamed,
    flops,
    states,
    roles,
    groups: [...groups].map(([n, g]) => g.finish(name(n))).sort((a, b) => b.total - a.total),
  };
}

/** How evenly a phase is spread over workers: means over its layers and steps of a worker's computing and loading. */
export interface Balance {
  readonly name: string;
  readonly workers: number;
  readonly least: number;
  readonly mean: number;
  readonly most: number;
}

/** The balance of every phase among the records of a scope, in the order of the program. */
export function balance(trace: Trace, { begin, end, step, workers }: Scope): Balance[] {
  const lane = trace.lanes[CONSUMER]!;
  const [inputs, left] = [lane.edges[2]!, lane.edges[5]!];
  const [low, high] = step < 0 ? [begin, end] : [0, trace.end + 1];
  // A worker's share of a label in a step, and what all workers have of it.
  const all = new Map<number, { phase: number; workers: number; sum: number; least: number; most: number }>();
  for (let worker = workers[0]; worker < workers[1]; worker++) {
    const own = new Map<number, number>();
    for (let r = trace.firstAfter(lane, worker, low); r < trace.workerOffsets[worker + 1]!; r++) {
      if (lane.search[r]! >= high) break;
      // Of what the range cuts no worker has all.
      if (inputs[r]! < low || left[r]! > high || (step >= 0 && trace.step[r] !== step)) continue;
      const key = trace.step[r]! * trace.labels.length + trace.label[r]!;
      own.set(key, (own.get(key) ?? 0) + left[r]! - inputs[r]!);
      if (!all.has(key)) all.set(key, { phase: trace.phase[r]!, workers: 0, sum: 0, least: Infinity, most: 0 });
    }
    for (const [key, time] of own) {
      const share = all.get(key)!;
      share.workers++;
      share.sum += time;
      share.least = Math.min(share.least, time);
      share.most = Math.max(share.most, time);
    }
  }
  const sums = trace.phases.map((name) => ({ name, count: 0, workers: 0, least: 0, mean: 0, most: 0 }));
  for (const { phase, workers: own, sum, least, most } of all.values()) {
    const total = sums[phase]!;
    total.count++;
    total.workers += own;
    total.least += least;
    total.mean += sum / own;
    total.most += most;
  }
  return sums
    .filter(({ count }) => count > 0)
    .map(({ name, count, workers: own, least, mean, most }) => {
      return { name, workers: own / count, least: least / count, mean: mean / count, most: most / count };
    });
}

/** One group of two traces side by side. */
export interface Delta {
  readonly name: string;
  readonly a: GroupStatistics | null;
  readonly b: GroupStatistics | null;
  readonly change: number;
}

/** Groups of the same name, the largest change of time first. */
export function compare(a: readonly GroupStatistics[], b: readonly GroupStatistics[]): Delta[] {
  const names = new Set([...a, ...b].map((group) => group.name));
  const inA = new Map(a.map((g) => [g.name, g]));
  const inB = new Map(b.map((g) => [g.name, g]));
  return [...names]
    .map((name) => {
      const [first, second] = [inA.get(name) ?? null, inB.get(name) ?? null];
      return { name, a: first, b: second, change: (second?.total ?? 0) - (first?.total ?? 0) };
    })
    .sort((x, y) => Math.abs(y.change) - Math.abs(x.change));
}
