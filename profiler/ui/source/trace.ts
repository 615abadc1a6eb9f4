/**
 * A trace in memory: columns of numbers, one entry per record (one instruction executed once).
 *
 * Records are numbered by worker, then step, then place in the queue: what one worker did lies together, in
 * order of time. `fileIndex` gives a record's number in the file.
 */

import { Program, layerOf, phaseOf } from "./program.ts";
import { CONSUMER, LOADER, ROLES, SEGMENTS } from "./roles.ts";
import { FileError, Safetensors, int64At, quote } from "./safetensors.ts";

const FORMAT = "megavm-trace";
const VERSION = "1";
const MAX_WORKERS = 65536;
const MAX_SUBROWS = 4;
/** Of the upper half of a time: 2^60 ns. */
const MAX_HIGH = 2 ** 28;

export interface EventInfo {
  readonly name: string;
  readonly role: string;
  readonly help: string;
}

export interface Machine {
  readonly name: string;
  readonly device: string;
  /** Bytes per nanosecond (GB/s) that the memory can give; null: unknown. */
  readonly bandwidth: number | null;
  readonly clock: string;
  readonly clockStep: number;
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

export class Trace {
  readonly header: Readonly<Record<string, unknown>>;
  readonly machine: Machine;
  readonly model: string;
  readonly events: readonly EventInfo[];
  readonly programs: readonly Program[];
  /** Rows of workers. If the worker of a record is not known, the last one holds such records. */
  readonly workers: number;
  readonly unknownWorker: boolean;
  readonly steps: number;
  readonly stepProgram: Int32Array;
  readonly stepNumber: Float64Array;
  readonly stepTokens: Int32Array;
  /** When the consumers of a step first began, and when its last event was. */
  readonly stepBegin: Float64Array;
  readonly stepEnd: Float64Array;
  /** Records of step s are `byFile[stepOffsets[s]]` up to `byFile[stepOffsets[s + 1]]`. */
  readonly stepOffsets: Int32Array;
  readonly byFile: Int32Array;
  readonly fileIndex: Int32Array;
  /** Number of records. */
  readonly count: number;
  readonly workerOffsets: Int32Array;
  readonly step: Int32Array;
  readonly worker: Int32Array;
  readonly slot: Int32Array;
  readonly instruction: Int32Array;
  readonly cause: Int32Array;
  readonly causeChannel: Int32Array;
  readonly times: readonly Float64Array[];
  readonly lanes: readonly Lane[];
  /** The different instruction kinds, phases and labels of all programs, and each record's number among them. */
  readonly kinds: readonly string[];
  readonly phases: readonly string[];
  readonly labels: readonly string[];
  readonly kind: Uint16Array;
  readonly phase: Uint16Array;
  readonly label: Int32Array;
  readonly layer: Int32Array;
  readonly bytes: Float64Array;
  readonly loadBytes: Float64Array;
  /** End of the last event. */
  readonly end: number;
  private readonly instances: (Int32Array | undefined)[] = [];

  constructor(
    readonly buffer: ArrayBuffer,
    readonly name: string,
  ) {
    const file = new Safetensors(buffer);
    const header = (this.header = readHeader(file));
    this.machine = readMachine(header);
    const model = objectOf(header["model"]);
    this.model = typeof model["name"] === "string" ? model["name"] : "";
    this.events = arrayOf(header["events"]).map((e) => {
      const { name, role, help } = objectOf(e);
      return { name: String(name), role: String(role), help: String(help ?? "") };
    });
    const headers = arrayOf(header["programs"]);
    this.programs = headers.map((h, p) => new Program(p, h, file));

    this.stepProgram = file.int32("step.program", null);
    this.steps = this.stepProgram.length;
    const numbers = file.int64("step.number", this.steps);
    this.stepNumber = Float64Array.from({ length: this.steps }, (_, s) => int64At(numbers, s));
    this.stepTokens = file.int32("step.tokens", this.steps);
    for (const program of this.stepProgram) {
      if (program < 0 || program >= this.programs.length) {
        throw new FileError(`The file is damaged: a step has program ${program} of ${this.programs.length}.`);
      }
    }

    const fileStep = file.int32("record.step", null);
    const count = (this.count = fileStep.length);
    if (count === 0) throw new FileError("The trace is empty: it has no records.");
    let fileWorker = file.int32("record.worker", count);
    const fileInstruction = file.int32("record.instruction", count);
    this.stepOffsets = this.countSteps(fileStep);
    const workers = this.countWorkers(fileWorker);
    this.unknownWorker = fileWorker.includes(-1);
    this.workers = workers + (this.unknownWorker ? 1 : 0);
    if (this.unknownWorker) fileWorker = fileWorker.map((w) => (w < 0 ? workers : w));

    // Number the records by worker. The file has them by step, so each worker's stay in order.
    const offsets = (this.workerOffsets = new Int32Array(this.workers + 1));
    for (let i = 0; i < count; i++) offsets[fileWorker[i]! + 1]!++;
    for (let w = 0; w < this.workers; w++) offsets[w + 1]! += offsets[w]!;
    const next = offsets.slice();
    this.byFile = new Int32Array(count);
    this.fileIndex = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      const record = next[fileWorker[i]!]!++;
      this.byFile[i] = record;
      this.fileIndex[record] = i;
    }
    const gather = (column: Int32Array): Int32Array => {
      const out = new Int32Array(count);
      for (let r = 0; r < count; r++) out[r] = column[this.fileIndex[r]!]!;
      return out;
    };
    this.step = gather(fileStep);
    this.worker = gather(fileWorker);
    this.slot = gather(file.int32("record.slot", count));
    this.instruction = gather(fileInstruction);
    const cause = gather(file.int32("record.cause", count));
    this.causeChannel = gather(file.int32("record.cause_channel", count));
    this.checkRecords(cause);
    this.cause = cause.map((c) => (c < 0 ? -1 : this.byFile[c]!));
    this.times = this.readTimes(file);

    // Names of what the records execute.
    const kinds = new Names();
    const phases = new Names();
    const labels = new Names();
    const perProgram = this.programs.map((program) => {
      const kind = new Uint16Array(program.count);
      const phase = new Uint16Array(program.count);
      const label = new Int32Array(program.count);
      const layer = new Int32Array(program.count);
      const layers = program.labels.map(layerOf);
      const phaseNumbers = program.labels.map((l) => phases.number(phaseOf(l)));
      const labelNumbers = program.labels.map((l) => labels.number(l));
      for (let i = 0; i < program.count; i++) {
        const l = program.label[i]!;
        kind[i] = kinds.number(program.opcode(i).name);
        phase[i] = phaseNumbers[l]!;
        label[i] = labelNumbers[l]!;
        layer[i] = layers[l]!;
      }
      return { kind, phase, label, layer, bytes: program.bytes, loadBytes: program.loadBytes };
    });
    this.kinds = kinds.list;
    this.phases = phases.list;
    this.labels = labels.list;
    this.kind = new Uint16Array(count);
    this.phase = new Uint16Array(count);
    this.label = new Int32Array(count);
    this.layer = new Int32Array(count);
    this.bytes = new Float64Array(count);
    this.loadBytes = new Float64Array(count);
    for (let r = 0; r < count; r++) {
      const info = perProgram[this.stepProgram[this.step[r]!]!]!;
      const i = this.instruction[r]!;
      this.kind[r] = info.kind[i]!;
      this.phase[r] = info.phase[i]!;
      this.label[r] = info.label[i]!;
      this.layer[r] = info.layer[i]!;
      this.bytes[r] = info.bytes[i]!;
      this.loadBytes[r] = Math.min(info.loadBytes[i]!, info.bytes[i]!);
    }

    this.lanes = ROLES.map((_, role) => this.makeLane(role));
    this.stepBegin = new Float64Array(this.steps).fill(Infinity);
    this.stepEnd = new Float64Array(this.steps).fill(-Infinity);
    this.end = this.measureSteps();
  }

  private countSteps(step: Int32Array): Int32Array {
    const offsets = new Int32Array(this.steps + 1);
    let before = 0;
    for (let i = 0; i < step.length; i++) {
      const s = step[i]!;
      if (s < before || s >= this.steps) {
        throw new FileError(`The file is damaged: record ${i} has step ${s}, expected ${before} to ${this.steps - 1}.`);
      }
      offsets[s + 1]!++;
      before = s;
    }
    for (let s = 0; s < this.steps; s++) offsets[s + 1]! += offsets[s]!;
    return offsets;
  }

  private countWorkers(worker: Int32Array): number {
    const workers = Math.max(0, ...this.programs.map((p) => p.workers));
    if (!Number.isInteger(workers) || workers < 1 || workers > MAX_WORKERS) {
      throw new FileError(`The file is damaged: it has ${workers} workers, expected 1 to ${MAX_WORKERS}.`);
    }
    for (let i = 0; i < worker.length; i++) {
      const w = worker[i]!;
      if (w < -1 || w >= workers) {
        throw new FileError(`The file is damaged: record ${i} has worker ${w} of ${workers}.`);
      }
    }
    return workers;
  }

  private checkRecords(cause: Int32Array): void {
    for (let r = 0; r < this.count; r++) {
      const program = this.programs[this.stepProgram[this.step[r]!]!]!;
      const i = this.instruction[r]!;
      if (i < 0 || i >= program.count) {
        throw new FileError(`The file is damaged: a record has instruction ${i} of ${program.count}.`);
      }
      if (cause[r]! < -1 || cause[r]! >= this.count) {
        throw new FileError(`The file is damaged: a record has cause ${cause[r]} of ${this.count}.`);
      }
      if (this.causeChannel[r]! < -1 || this.causeChannel[r]! >= program.channelKind.length) {
        throw new FileError(`The file is damaged: a record has the channel ${this.causeChannel[r]}.`);
      }
    }
  }

  private readTimes(file: Safetensors): Float64Array[] {
    const words = file.int64("times", this.events.length, this.count);
    return this.events.map((_, e) => {
      const out = new Float64Array(this.count);
      const start = 2 * e * this.count;
      for (let r = 0; r < this.count; r++) {
        const at = start + 2 * this.fileIndex[r]!;
        const high = words[at + 1]!;
        if (high >= MAX_HIGH) throw new FileError("The file is damaged: a time is longer than 36 years.");
        out[r] = high < 0 ? -1 : high * 4294967296 + (words[at]! >>> 0);
      }
      return out;
    });
  }

  /** Times of an event by its name, -1 where it was not noted; null when the machine does not have it. */
  timesOf(event: string): Float64Array | null {
    const index = this.events.findIndex((e) => e.name === event);
    return index < 0 ? null : this.times[index]!;
  }

  /** The spans of a role, from the events that were noted. */
  private makeLane(role: number): Lane {
    const edges = role === CONSUMER ? this.consumerEdges() : this.otherEdges(role);
    if (edges === null) {
      const nothing = new Float64Array(0);
      return { edges: [], search: nothing, subrow: null, depth: 1, used: false };
    }
    const last = edges.length - 1;
    const search = new Float64Array(this.count);
    const subrow = new Uint8Array(this.count);
    const ends = new Float64Array(MAX_SUBROWS);
    let depth = 1;
    for (let w = 0; w < this.workers; w++) {
      let latest = 0;
      ends.fill(0);
      for (let r = this.workerOffsets[w]!; r < this.workerOffsets[w + 1]!; r++) {
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
    return { edges, search, subrow: depth > 1 ? subrow : null, depth, used: true };
  }

  /** Begin, end of the wait for barriers, inputs, last load, sums, end: what was not noted filled in from what was. */
  private consumerEdges(): Float64Array[] {
    const { count } = this;
    const edges = Array.from({ length: 6 }, () => new Float64Array(count));
    const [begin, waited, inputs, loaded, computed, end] = edges as [
      Float64Array,
      Float64Array,
      Float64Array,
      Float64Array,
      Float64Array,
      Float64Array,
    ];
    const none = new Float64Array(count).fill(-1);
    const noted = (event: string): Float64Array => this.timesOf(event) ?? none;
    const [ready, issued, arrived] = [noted("ready"), noted("load_issued"), noted("load_arrived")];
    const [notedBegin, notedInputs, notedComputed, notedEnd] = [
      noted("begin"),
      noted("inputs"),
      noted("computed"),
      noted("end"),
    ];
    const substitutes = [notedBegin, noted("fetched"), ready, noted("load_begin"), notedInputs, notedComputed];
    for (let r = 0; r < count; r++) {
      let last = notedEnd[r]!;
      if (last < 0) for (const times of this.times) last = Math.max(last, times[r]!);
      const first = substitutes.find((times) => times[r]! >= 0)?.[r] ?? last;
      const from = Math.min(first, last);
      const clip = (time: number, low: number, high: number, otherwise: number): number =>
        time < 0 ? otherwise : Math.max(low, Math.min(time, high));
      const barriers = clip(ready[r]!, from, last, from);
      const there = clip(notedInputs[r]!, from, last, barriers);
      const sums = clip(notedComputed[r]!, there, last, last);
      end[r] = last;
      begin[r] = from;
      inputs[r] = there;
      waited[r] = Math.min(barriers, there);
      computed[r] = sums;
      loaded[r] = clip(arrived[r]! >= 0 ? arrived[r]! : issued[r]!, there, sums, there);
    }
    return edges;
  }

  private otherEdges(role: number): Float64Array[] | null {
    const { count } = this;
    const names = [["fetched", "ready"], ["load_begin", "load_issued", "load_arrived"], [], ["end", "signalled"]][role]!;
    const found = names.map((name) => this.timesOf(name));
    const [first, last] = [found[0], found[found.length - 1]];
    if (!first || !last) return null;
    const edges = names.map(() => new Float64Array(count).fill(-1));
    let used = false;
    for (let r = 0; r < count; r++) {
      let arrived = last[r]!;
      if (role === LOADER && arrived < 0) arrived = found[1]?.[r] ?? -1;
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

  /** A step begins with its first event, its predecessor being over, and ends with its last one. */
  private measureSteps(): number {
    let end = 0;
    for (let r = 0; r < this.count; r++) {
      const s = this.step[r]!;
      const [first, last] = this.extent(r);
      if (last < 0) continue;
      if (last > this.stepEnd[s]!) this.stepEnd[s] = last;
      if (first < this.stepBegin[s]!) this.stepBegin[s] = first;
      if (last > end) end = last;
    }
    let before = 0;
    for (let s = 0; s < this.steps; s++) {
      this.stepEnd[s] = Math.max(before, this.stepEnd[s]!);
      this.stepBegin[s] = Math.min(Math.max(before, this.stepBegin[s]!), this.stepEnd[s]!);
      before = this.stepEnd[s]!;
    }
    return Math.max(end, 1);
  }

  /** The step of median duration among those of the most common number of rows. */
  typicalStep(): number {
    const counts = new Map<number, number>();
    for (const tokens of this.stepTokens) counts.set(tokens, (counts.get(tokens) ?? 0) + 1);
    const [common] = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0] ?? [0];
    const steps = Array.from({ length: this.steps }, (_, s) => s).filter((s) => this.stepTokens[s] === common);
    const time = (s: number): number => this.stepEnd[s]! - this.stepBegin[s]!;
    steps.sort((a, b) => time(a) - time(b));
    return steps[steps.length >> 1] ?? 0;
  }

  /** The step that answers to one of another trace: of as many rows, and as many such steps before it. */
  likeStep(other: Trace, step: number): number {
    const tokens = other.stepTokens[step];
    const place = other.stepTokens.subarray(0, step).filter((t) => t === tokens).length;
    const steps = Array.from({ length: this.steps }, (_, s) => s).filter((s) => this.stepTokens[s] === tokens);
    return steps[Math.min(place, steps.length - 1)] ?? Math.min(step, this.steps - 1);
  }

  workerName(worker: number): string {
    return this.unknownWorker && worker === this.workers - 1 ? "unknown" : String(worker);
  }

  programOf(record: number): Program {
    return this.programs[this.stepProgram[this.step[record]!]!]!;
  }

  kindOf(record: number): string {
    return this.kinds[this.kind[record]!]!;
  }

  labelOf(record: number): string {
    return this.labels[this.label[record]!]!;
  }

  /** First and last event of a record. */
  extent(record: number): [number, number] {
    let low = Infinity;
    let high = -1;
    for (const times of this.times) {
      const t = times[record]!;
      if (t < 0) continue;
      if (t < low) low = t;
      if (t > high) high = t;
    }
    return high < 0 ? [-1, -1] : [low, high];
  }

  /** The consumers' span of a record. */
  span(record: number): [number, number] {
    const { edges } = this.lanes[CONSUMER]!;
    return [edges[0]![record]!, edges[5]![record]!];
  }

  /** How long the segments of the consumers' span of a record are, by shade. */
  split(record: number): number[] {
    const { edges } = this.lanes[CONSUMER]!;
    return SEGMENTS[CONSUMER]!.map((_, i) => edges[i + 1]![record]! - edges[i]![record]!);
  }

  /** How long the consumers of a record waited. */
  waitOf(record: number): number {
    const { edges } = this.lanes[CONSUMER]!;
    return edges[2]![record]! - edges[0]![record]!;
  }

  /** First record of a worker whose span may reach beyond a time: `overlap` before the first that begins then. */
  firstAfter(lane: Lane, worker: number, time: number, overlap = 12): number {
    let low = this.workerOffsets[worker]!;
    const start = low;
    let high = this.workerOffsets[worker + 1]!;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (lane.search[middle]! < time) low = middle + 1;
      else high = middle;
    }
    return Math.max(start, low - overlap);
  }

  /** The record of an instruction in a step; -1: it is not in the trace. */
  instance(step: number, instruction: number): number {
    if (step < 0 || step >= this.steps) return -1;
    let found = this.instances[step];
    if (found === undefined) {
      found = new Int32Array(this.programs[this.stepProgram[step]!]!.count).fill(-1);
      for (let i = this.stepOffsets[step]!; i < this.stepOffsets[step + 1]!; i++) {
        const record = this.byFile[i]!;
        found[this.instruction[record]!] = record;
      }
      this.instances[step] = found;
    }
    return found[instruction] ?? -1;
  }

  /** The step that runs at a time: the last that has begun. */
  stepAt(time: number): number {
    let low = 0;
    let high = this.steps;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.stepBegin[middle]! <= time) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }
}

/** Numbers for names, in order of appearance. */
class Names {
  readonly list: string[] = [];
  private readonly numbers = new Map<string, number>();

  number(name: string): number {
    let number = this.numbers.get(name);
    if (number === undefined) {
      number = this.list.push(name) - 1;
      if (number > 65535) throw new FileError("The file has more than 65536 different names.");
      this.numbers.set(name, number);
    }
    return number;
  }
}

function objectOf(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value)
    ? (value as Record<string, unknown>)
    : {};
}

function arrayOf(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

function readHeader(file: Safetensors): Record<string, unknown> {
  const format = file.metadata.get("format");
  if (format !== FORMAT) {
    throw new FileError(
      format === undefined
        ? "The file is not a trace: it does not name its format."
        : `The file is not a trace: its format is ${quote(format)}, expected "${FORMAT}".`,
    );
  }
  const version = file.metadata.get("version") ?? "";
  if (version !== VERSION) {
    throw new FileError(`The trace has version ${quote(version)}; this page reads version ${VERSION}.`);
  }
  try {
    const header: unknown = JSON.parse(file.metadata.get("header") ?? "");
    if (typeof header === "object" && header !== null && !Array.isArray(header)) {
      return header as Record<string, unknown>;
    }
  } catch {
    // Said below.
  }
  throw new FileError("The file is damaged: the header of the trace is not a JSON object.");
}

function readMachine(header: Record<string, unknown>): Machine {
  const { name, device, bandwidth, clock, clock_step } = objectOf(header["machine"]);
  const known = typeof bandwidth === "number" && Number.isFinite(bandwidth) && bandwidth > 0;
  return {
    name: typeof name === "string" ? name : "",
    device: typeof device === "string" ? device : "",
    bandwidth: known ? bandwidth / 1e9 : null,
    clock: typeof clock === "string" ? clock : "",
    clockStep: typeof clock_step === "number" ? clock_step : 0,
  };
}
