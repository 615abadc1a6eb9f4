/** What a record waited for, who waited for it, and the critical path of a step. */

import { CONSUMER } from "./roles.ts";
import type { Trace } from "./trace.ts";

export interface Incoming {
  readonly channel: number;
  readonly name: string;
  readonly tagged: boolean;
  readonly target: number;
  readonly back: number;
  /** Instructions that produce it. */
  readonly count: number;
  /** Records of them that are in the trace. */
  readonly producers: readonly number[];
  /** The producer that completed the channel; -1: none is in the trace. */
  readonly last: number;
  readonly lastTime: number;
}

export interface Outgoing {
  readonly channel: number;
  readonly name: string;
  readonly tagged: boolean;
  readonly consumers: readonly number[];
}

/** How the record that came last held this one up. */
export function heldUpBy(trace: Trace, record: number): "start" | "queue" | "words" | "barrier" {
  if (trace.cause[record]! < 0) return "start";
  const channel = trace.causeChannel[record]!;
  if (channel < 0) return "queue";
  return trace.programOf(record).channelKind[channel] === 1 ? "words" : "barrier";
}

/** When a record held others up no longer: when its results were stored (words) or its barrier signalled. */
export function doneAt(trace: Trace, record: number, stored: boolean): number {
  const end = trace.stored[record]!;
  return stored ? end : Math.max(end, trace.timesOf("signalled")?.[record] ?? -1);
}

/** When the cause of a record was over: its consumers had left it (queue), its words were stored, its barrier signalled. */
export function causeOver(trace: Trace, record: number): number {
  const cause = trace.cause[record]!;
  const by = heldUpBy(trace, record);
  return by === "queue" ? trace.span(cause)[1] : doneAt(trace, cause, by === "words");
}

/** When a record's inputs were there. */
export function inputsAt(trace: Trace, record: number): number {
  return trace.lanes[CONSUMER]!.edges[2]![record]!;
}

export function incomingOf(trace: Trace, record: number): Incoming[] {
  const program = trace.programOf(record);
  const step = trace.step[record]!;
  return program.waitsOf(trace.instruction[record]!).map((row) => {
    const channel = program.waits[3 * row + 1]!;
    const back = program.waits[3 * row + 2]!;
    const tagged = program.channelKind[channel] === 1;
    const from = step - back;
    // Producers of an earlier step are instructions of this program: they are looked up only in the same one.
    const same = from >= 0 && trace.stepProgram[from] === trace.stepProgram[step];
    const producers: number[] = [];
    const instructions = program.producers(channel);
    for (const instruction of same ? instructions : []) {
      const producer = trace.instance(from, instruction);
      if (producer >= 0) producers.push(producer);
    }
    const target = program.channelTarget[channel]!;
    // Words are complete with the last of their writers, a barrier with the signal that reaches its target.
    const inTime = [...producers].sort((a, b) => doneAt(trace, a, tagged) - doneAt(trace, b, tagged));
    const last = (tagged ? undefined : inTime[target - 1]) ?? inTime[inTime.length - 1] ?? -1;
    const lastTime = last < 0 ? -1 : doneAt(trace, last, tagged);
    const name = program.channelName(channel);
    return { channel, name, tagged, target, back, count: instructions.length, producers, last, lastTime };
  });
}

export function outgoingOf(trace: Trace, record: number): Outgoing[] {
  const program = trace.programOf(record);
  const step = trace.step[record]!;
  const byChannel = new Map<number, number[]>();
  for (const row of program.waitersOf(trace.instruction[record]!)) {
    const channel = program.waits[3 * row + 1]!;
    const to = step + program.waits[3 * row + 2]!;
    if (to >= trace.steps || trace.stepProgram[to] !== trace.stepProgram[step]) continue;
    const consumer = trace.instance(to, program.waits[3 * row]!);
    if (consumer < 0) continue;
    const consumers = byChannel.get(channel) ?? [];
    consumers.push(consumer);
    byChannel.set(channel, consumers);
  }
  return [...byChannel].map(([channel, consumers]) => ({
    channel,
    name: program.channelName(channel),
    tagged: program.channelKind[channel] === 1,
    consumers,
  }));
}

/** What the time of a link of a critical path is. */
export const PARTS = ["delay", "latency", "loading", "computing", "signalling"] as const;
export const PART_HELP = [
  "its cause is over, but the consumers have not turned to it",
  "the consumers wait for what the cause has sent",
  "inputs are there, the last load is not",
  "the consumers compute and store",
  "the next one has to be told",
] as const;

/** One record on a critical path: it counts from when its cause was over until it no longer held up the next one. */
export interface Link {
  readonly record: number;
  readonly begin: number;
  readonly end: number;
  /** Time of each of `PARTS`. */
  readonly parts: readonly number[];
}

/** Follows causes: back from a record, forwards to those that it caused. */
export class Causes {
  private offsets: Int32Array | null = null;
  private effects: Int32Array | null = null;
  private readonly paths = new Map<number, readonly Link[]>();

  constructor(private readonly trace: Trace) {}

  /** Records whose cause is this one. */
  effectsOf(record: number): Int32Array {
    if (this.offsets === null || this.effects === null) {
      const { cause, count } = this.trace;
      const offsets = new Int32Array(count + 1);
      for (const c of cause) if (c >= 0) offsets[c + 1]!++;
      for (let r = 0; r < count; r++) offsets[r + 1]! += offsets[r]!;
      const next = offsets.slice();
      const effects = new Int32Array(offsets[count]!);
      for (let r = 0; r < count; r++) if (cause[r]! >= 0) effects[next[cause[r]!]!++] = r;
      this.offsets = offsets;
      this.effects = effects;
    }
    return this.effects.subarray(this.offsets[record]!, this.offsets[record + 1]!);
  }

  /** The effect to follow: the one on the critical path of its step, else the one that was done last. */
  forward(record: number): number {
    let best = -1;
    let latest = -1;
    for (const effect of this.effectsOf(record)) {
      if (this.path(this.trace.step[effect]!).some((entry) => entry.record === effect)) return effect;
      const time = doneAt(this.trace, effect, false);
      if (time > latest) {
        latest = time;
        best = effect;
      }
    }
    return best;
  }

  /** The critical path of a step, in order of time. */
  path(step: number): readonly Link[] {
    let path = this.paths.get(step);
    if (path === undefined) this.paths.set(step, (path = this.findPath(step)));
    return path;
  }

  private findPath(step: number): Link[] {
    const { trace } = this;
    const { edges } = trace.lanes[CONSUMER]!;
    const begin = trace.stepBegin[step]!;
    let record = -1;
    let until = -1;
    for (let i = trace.stepOffsets[step]!; i < trace.stepOffsets[step + 1]!; i++) {
      const time = doneAt(trace, trace.byFile[i]!, false);
      if (time > until) {
        until = time;
        record = trace.byFile[i]!;
      }
    }
    const seen = new Set<number>();
    const links: Link[] = [];
    while (record >= 0 && until > begin && !seen.has(record)) {
      seen.add(record);
      const cause = trace.cause[record]!;
      // The first link counts from the begin of the step: its worker turned to it late.
      const since = cause < 0 ? begin : Math.max(begin, Math.min(until, this.over(record)));
      let at = since;
      const marks = [edges[0]![record]!, edges[2]![record]!, edges[3]![record]!, trace.stored[record]!, until];
      const parts = marks.map((mark) => {
        const to = Math.min(until, Math.max(mark, at));
        const part = to - at;
        at = to;
        return part;
      });
      links.push({ record, begin: since, end: until, parts });
      record = cause;
      until = since;
    }
    return links.reverse();
  }

  /** When a cause no longer held a record up: at the latest when its inputs were there. */
  private over(record: number): number {
    const over = causeOver(this.trace, record);
    return this.trace.causeChannel[record]! < 0 ? over : Math.min(over, inputsAt(this.trace, record));
  }
}
