/** The search box: `kind:attention layer:12 worker:7 wait>3us`. All terms must hold. */

import { CONSUMER } from "./roles.ts";
import { quote } from "./safetensors.ts";
import type { Trace } from "./trace.ts";

type Test = (record: number) => boolean;

const TIMES: Readonly<Record<string, number>> = { "": 1, ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9 };
const SIZES: Readonly<Record<string, number>> = {
  "": 1,
  b: 1,
  kb: 1e3,
  mb: 1e6,
  gb: 1e9,
  kib: 1024,
  mib: 1024 ** 2,
  gib: 1024 ** 3,
};

export const HELP =
  "kind: phase: label: layer: worker: sm: rank: step: slot: instruction: with a name, a number, a range 0-7 or a list 1,2; " +
  "of several ranks, worker:1:3 and sm:1:3 are those of rank 1; " +
  "wait barrier words loading compute finish time load bytes with > >= < <= and a number with its unit (3us, 1.5ms, 64KB); " +
  "! before a term: not; other words are looked for in labels and kinds";

const KEYS = ["kind", "phase", "label", "layer", "worker", "sm", "rank", "step", "slot", "instruction"];
const MAX_SPELLED = 12;

/** What is wrong with a query, for the page. */
export class QueryError extends Error {}

function measures(trace: Trace): Readonly<Record<string, (record: number) => number>> {
  const loads = trace.lanes[1]!;
  const spanTime = (r: number): number => {
    const [from, to] = trace.span(r);
    return to - from;
  };
  return {
    wait: (r) => trace.waitOf(r),
    barrier: (r) => trace.split(r)[0]!,
    words: (r) => trace.split(r)[1]!,
    loading: (r) => trace.split(r)[2]!,
    compute: (r) => trace.split(r)[3]!,
    finish: (r) => trace.split(r)[4]!,
    time: spanTime,
    duration: spanTime,
    load: (r) => (loads.used ? loads.edges[2]![r]! - loads.edges[0]![r]! : 0),
    bytes: (r) => trace.bytes[r]!,
  };
}

function compareTerm(trace: Trace, name: string, sign: string, text: string): Test {
  const value = measures(trace)[name];
  if (value === undefined) throw new QueryError(`"${name}" cannot be compared`);
  const found = /^([\d.]+)([a-zµ]*)$/i.exec(text);
  const units = name === "bytes" ? SIZES : TIMES;
  const unit = found ? units[found[2]!.toLowerCase()] : undefined;
  if (found === null || unit === undefined || Number.isNaN(Number(found[1]))) {
    throw new QueryError(`"${text}" is not ${name === "bytes" ? "a size such as 64KB" : "a time such as 3us"}`);
  }
  const limit = Number(found[1]) * unit;
  switch (sign) {
    case ">":
      return (r) => value(r) > limit;
    case ">=":
      return (r) => value(r) >= limit;
    case "<":
      return (r) => value(r) < limit;
    case "<=":
      return (r) => value(r) <= limit;
    default:
      return (r) => value(r) === limit;
  }
}

/** Numbers such as 7, 0-3 or 1,4,8-9; "none" is -1. */
function numbers(text: string, name: string): (value: number) => boolean {
  const ranges = text.split(",").map((part): [number, number] => {
    if (part === "none") return [-1, -1];
    const found = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (found === null) throw new QueryError(`"${text}" is not a ${name}`);
    const low = Number(found[1]);
    return [low, found[2] === undefined ? low : Number(found[2])];
  });
  return (value) => ranges.some(([low, high]) => value >= low && value <= high);
}

/** Numbers of workers or SMs: 3, or 1:3 for those of rank 1. `own` is the number within the rank. */
function ofRanks(trace: Trace, text: string, key: string, all: (record: number) => number, own: (record: number) => number): Test {
  const tests = text.split(",").map((part): Test => {
    const found = /^(\d+):(.+)$/.exec(part);
    const matches = numbers(found?.[2] ?? part, key);
    if (found === null) return (r) => matches(all(r));
    const rank = Number(found[1]);
    return (r) => trace.rankOf(trace.worker[r]!) === rank && matches(own(r));
  });
  return (r) => tests.some((test) => test(r));
}

/** Which of the names contain one of the alternatives; an alternative that is a name means that name alone. */
function names(list: readonly string[], text: string): Uint8Array {
  const alternatives = text.toLowerCase().split(",");
  const lower = list.map((name) => name.toLowerCase());
  return Uint8Array.from(lower, (name) => {
    return alternatives.some((a) => (lower.includes(a) ? name === a : a !== "" && name.includes(a))) ? 1 : 0;
  });
}

/** The same, of kinds or phases, of which the trace has few: a name that matches none is answered with those there are. */
function known(list: readonly string[], text: string, key: string): Uint8Array {
  const found = names(list, text);
  if (found.includes(1)) return found;
  const spelled = [...list].sort().slice(0, MAX_SPELLED).map((name) => quote(name).slice(1, -1));
  const more = list.length > MAX_SPELLED ? ", …" : "";
  throw new QueryError(`no ${key} is called ${quote(text)}; this trace has ${spelled.join(", ")}${more}`);
}

function keyTerm(trace: Trace, key: string, text: string): Test {
  const numeric = (column: ArrayLike<number>): Test => {
    const matches = numbers(text, key);
    return (r) => matches(column[r]!);
  };
  switch (key) {
    case "kind": {
      const found = known(trace.kinds, text, key);
      return (r) => found[trace.kind[r]!] === 1;
    }
    case "phase": {
      const found = known(trace.phases, text, key);
      return (r) => found[trace.phase[r]!] === 1;
    }
    case "label": {
      const found = names(trace.labels, text);
      return (r) => found[trace.label[r]!] === 1;
    }
    case "layer":
      return numeric(trace.layer);
    case "worker":
      if (text === "unknown") return (r) => trace.rankOf(trace.worker[r]!) === undefined;
      return ofRanks(trace, text, key, (r) => trace.worker[r]!, (r) => trace.workerOfRank(trace.worker[r]!));
    case "sm": {
      const { sm } = trace;
      if (sm === null) throw new QueryError("this trace does not say on which SM workers ran");
      return ofRanks(trace, text, key, (r) => sm[r]!, (r) => sm[r]!);
    }
    case "rank": {
      const matches = numbers(text, key);
      return (r) => matches(trace.rankOf(trace.worker[r]!) ?? -1);
    }
    case "slot":
      return numeric(trace.slot);
    case "instruction":
      return numeric(trace.instruction);
    case "step": {
      const matches = numbers(text, key);
      return (r) => matches(trace.stepNumber[trace.step[r]!]!);
    }
    default:
      throw new QueryError(`there is no "${key}:" to search for; there are ${KEYS.join(": ")}:`);
  }
}

function term(trace: Trace, text: string): Test {
  if (text.startsWith("!") && text.length > 1) {
    const test = term(trace, text.slice(1));
    return (r) => !test(r);
  }
  const comparison = /^([a-z]+)(>=|<=|>|<|=)(.*)$/i.exec(text);
  if (comparison) return compareTerm(trace, comparison[1]!.toLowerCase(), comparison[2]!, comparison[3]!);
  const pair = /^([a-z]+):(.*)$/i.exec(text);
  if (pair) return keyTerm(trace, pair[1]!.toLowerCase(), pair[2]!);
  const word = text.toLowerCase();
  const labels = Uint8Array.from(trace.labels, (l) => (l.toLowerCase().includes(word) ? 1 : 0));
  const kinds = Uint8Array.from(trace.kinds, (k) => (k.toLowerCase().includes(word) ? 1 : 0));
  return (r) => labels[trace.label[r]!] === 1 || kinds[trace.kind[r]!] === 1;
}

/** Words of a query; quotes keep spaces together. Those around the sign of a comparison do not count. */
function words(query: string): string[] {
  const joined = query.replace(/("[^"]*"?)|\s*(>=|<=|[<>=])\s*/g, (_, quoted?: string, sign?: string) => quoted ?? sign ?? "");
  return (joined.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? []).map((w) => w.replace(/"/g, "")).filter((w) => w !== "");
}

/** The test of a query, null for an empty one. Throws QueryError. */
export function parse(trace: Trace, query: string): Test | null {
  const tests = words(query).map((w) => term(trace, w));
  return tests.length === 0 ? null : (r) => tests.every((test) => test(r));
}

/** What a query finds: which records, and the records in order of time. */
export interface Matches {
  readonly mask: Uint8Array;
  readonly records: Int32Array;
  /** When the spans of the records begin. */
  readonly begins: Float64Array;
}

/** The first of sorted times that is not before a time. */
export function firstFrom(times: Float64Array, time: number): number {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (times[middle]! < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function find(trace: Trace, query: string): Matches | null {
  const test = parse(trace, query);
  if (test === null) return null;
  const mask = new Uint8Array(trace.count);
  let count = 0;
  for (let r = 0; r < trace.count; r++) {
    if (test(r)) {
      mask[r] = 1;
      count++;
    }
  }
  const records = new Int32Array(count);
  for (let r = 0, i = 0; r < trace.count; r++) if (mask[r]) records[i++] = r;
  const begins = trace.lanes[CONSUMER]!.edges[0]!;
  records.sort((a, b) => begins[a]! - begins[b]! || a - b);
  return { mask, records, begins: Float64Array.from(records, (r) => begins[r]!) };
}
