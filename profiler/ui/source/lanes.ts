/** The spans of every role, from the events that the machine noted. */

import { CONSUMER, LOADER, STORER } from "./roles.ts";

const MAX_SUBROWS = 4;

/** The events of a trace; records are in order of workers. */
export interface Events {
  readonly count: number;
  readonly workers: number;
  readonly workerOffsets: Int32Array;
  readonly times: readonly Float64Array[];
  /** Times of an event by its name, -1 where it was not noted; null when the machine does not have it. */
  readonly timesOf: (event: string) => Float64Array | null;
  /** The record that came last of what each waited for, -1: none; and whether it came by tagged words. */
  readonly cause: Int32Array;
  readonly byWords: (record: number) => boolean;
  /** The last worker holds records of which it is not known who executed them. */
  readonly unknownWorker: boolean;
}

/** The spans of a role: where each record's span begins, its segments end, and which of its rows it is in. */
export interface Lane {
  /** Ends of segments: `edges[0]` begins the span, the last one ends it. -1 throughout: no span. */
  readonly edges: readonly Float64Array[];
  /** Begins that never fall within a worker, for binary search. */
  readonly search: Float64Array;
  /** Row of a span among those that overlap. */
  readonly subrow: Uint8Array | null;
  /** Number of rows that overlapping spans need. */
  readonly depth: number;
  /** Whether any record has this span. */
  readonly used: boolean;
}

/** When the results of every record were stored: `end`, or the last that was noted. */
export function storedTimes({ count, times, timesOf }: Events): Float64Array {
  const stored = timesOf("end")?.slice() ?? new Float64Array(count).fill(-1);
  for (let r = 0; r < count; r++) {
    if (stored[r]! < 0) for (const event of times) stored[r] = Math.max(stored[r]!, event[r]!);
  }
  return shared(stored, times);
}

/** The spans of all roles, from the events that were noted. */
export function makeLanes(roles: number, events: Events, stored: Float64Array): Lane[] {
  const consumer = consumerEdges(events, stored);
  const others = [...events.times, ...consumer];
  return Array.from({ length: roles }, (_, role) => {
    const edges = role === CONSUMER ? consumer : otherEdges(role, events);
    // The storer has what the consumers have left: it stores results, then signals.
    if (role === STORER && edges !== null) {
      const left = consumer[consumer.length - 1]!;
      return makeLane([edges[0]!.map((end, r) => (end < 0 ? -1 : left[r]!)), ...edges], events, others);
    }
    return makeLane(edges, events, others);
  });
}

/** The array among others that holds the same numbers, so that they are in memory once; else the array itself. */
function shared(array: Float64Array, others: readonly Float64Array[]): Float64Array {
  return others.find((other) => array.every((value, i) => value === other[i])) ?? array;
}

function makeLane(found: readonly Float64Array[] | null, events: Events, others: readonly Float64Array[]): Lane {
  const edges = found?.map((edge) => shared(edge, others)) ?? null;
  if (edges === null) {
    const nothing = new Float64Array(0);
    return { edges: [], search: nothing, subrow: null, depth: 1, used: false };
  }
  const last = edges.length - 1;
  const { count, workers, workerOffsets } = events;
  const search = new Float64Array(count);
  const subrow = new Uint8Array(count);
  const ends = new Float64Array(MAX_SUBROWS);
  let depth = 1;
  for (let w = 0; w < workers; w++) {
    let latest = 0;
    ends.fill(0);
    for (let r = workerOffsets[w]!; r < workerOffsets[w + 1]!; r++) {
      const begin = edges[0]![r]!;
      latest = Math.max(latest, begin);
      search[r] = latest;
      if (begin < 0) continue;
      let row = 0;
      while (row < MAX_SUBROWS - 1 && ends[row]! > begin) row++;
      ends[row] = Math.max(ends[row]!, edges[last]![r]!);
      subrow[r] = row;
      if (row >= depth) depth = row + 1;
    }
  }
  return { edges, search: shared(search, edges), subrow: depth > 1 ? subrow : null, depth, used: true };
}

/** A time within bounds; another where it was not noted. */
function clip(time: number, low: number, high: number, otherwise: number): number {
  return time < 0 ? otherwise : Math.max(low, Math.min(time, high));
}

/**
 * Begin, end of the wait for barriers, inputs, last load, sums, and when the consumers turned to the next instruction:
 * what was not noted filled in from what was.
 */
function consumerEdges(events: Events, stored: Float64Array): Float64Array[] {
  const { count, timesOf } = events;
  const edges = Array.from({ length: 6 }, () => new Float64Array(count));
  const [begin, waited, inputs, loaded, computed, left] = edges as [
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
  ];
  const none = new Float64Array(count).fill(-1);
  const noted = (event: string): Float64Array => timesOf(event) ?? none;
  const [ready, issued, arrived] = [noted("ready"), noted("load_issued"), noted("load_arrived")];
  const [notedBegin, notedInputs, notedComputed] = [noted("begin"), noted("inputs"), noted("computed")];
  const substitutes = [notedBegin, noted("fetched"), ready, noted("load_begin"), notedInputs, notedComputed];
  for (let r = 0; r < count; r++) {
    const last = stored[r]!;
    const first = substitutes.find((event) => event[r]! >= 0)?.[r] ?? last;
    const from = Math.min(first, last);
    const barriers = clip(ready[r]!, from, last, from);
    // Where the inputs were not noted, they were there when the last words were written.
    const words = events.byWords(r) ? clip(stored[events.cause[r]!]!, barriers, last, barriers) : barriers;
    const there = clip(notedInputs[r]!, from, last, words);
    const sums = clip(notedComputed[r]!, there, last, last);
    left[r] = last;
    begin[r] = from;
    inputs[r] = there;
    waited[r] = Math.min(barriers, there);
    computed[r] = sums;
    loaded[r] = clip(arrived[r]! >= 0 ? arrived[r]! : issued[r]!, there, sums, there);
  }
  // The consumers may turn to the next instruction while the storer stores.
  const known = events.workers - (events.unknownWorker ? 1 : 0);
  for (let w = 0; w < known; w++) {
    for (let r = events.workerOffsets[w]!; r + 1 < events.workerOffsets[w + 1]!; r++) {
      const least = notedComputed[r]! < 0 ? inputs[r]! : computed[r]!;
      left[r] = Math.max(least, Math.min(left[r]!, begin[r + 1]!));
      computed[r] = Math.min(computed[r]!, left[r]!);
      loaded[r] = Math.min(loaded[r]!, left[r]!);
    }
  }
  return edges;
}

function otherEdges(role: number, { count, timesOf }: Events): Float64Array[] | null {
  const names = [["fetched", "ready"], ["load_begin", "load_issued", "load_arrived"], [], ["end", "signalled"]][role]!;
  const found = names.map((name) => timesOf(name));
  const [first, last] = [found[0], found[found.length - 1]];
  if (!first || !last) return null;
  const edges = names.map(() => new Float64Array(count).fill(-1));
  let used = false;
  for (let r = 0; r < count; r++) {
    let arrived = last[r]!;
    // A kernel may note the arrival of what its first products need; its loads then go on.
    if (role === LOADER) arrived = Math.max(arrived, found[1]?.[r] ?? -1);
    if (first[r]! < 0 || arrived < 0) continue;
    used = true;
    edges[0]![r] = first[r]!;
    edges[edges.length - 1]![r] = Math.max(first[r]!, arrived);
    if (edges.length === 3) {
      const issued = found[1]?.[r] ?? -1;
      edges[1]![r] = issued < 0 ? edges[2]![r]! : Math.max(first[r]!, Math.min(issued, edges[2]![r]!));
    }
  }
  return used ? edges : null;
}
