/**
 * A trace in memory: columns of numbers, one entry per record (one instruction executed once).
 *
 * Records are numbered by worker, then step, then place in the queue: what one worker did lies together, in
 * order of time. `fileIndex` gives a record's number in the file.
 */

import { learnPhase } from "./colour.ts";
import { type Machine, readHeader, readMachine } from "./header.ts";
import { type Json, asList, asObject, asText } from "./json.ts";
import { type Events, type Lane, makeLanes, storedTimes } from "./lanes.ts";
import { Names, isolate } from "./names.ts";
import { Program, layerOf, phaseOf } from "./program.ts";
import { CONSUMER, ROLES, SEGMENTS } from "./roles.ts";
import { FileError, Safetensors, int64At } from "./safetensors.ts";

const MAX_WORKERS = 65536;
const MAX_SMS = 65536;
/** Of the upper half of a time: 2^60 ns. */
const MAX_HIGH = 2 ** 28;

export interface EventInfo {
  readonly name: string;
  readonly role: string;
  readonly help: string;
}

/** Numbers from 0 on, in as few bytes as hold the highest. */
type Counts = Uint16Array | Uint32Array | Float64Array;

function makeCounts(count: number, highest: number): Counts {
  if (highest < 2 ** 16) return new Uint16Array(count);
  return highest < 2 ** 32 ? new Uint32Array(count) : new Float64Array(count);
}

export class Trace implements Events {
  readonly header: Readonly<Json>;
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
  /** Sequences of every step, and its rows that run prompt chunks; null: the file does not say. */
  readonly stepSequences: Int32Array | null;
  readonly stepPromptRows: Int32Array | null;
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
  /** The SM of the rank's GPU on which each record was executed, -1: unknown; null: the file does not say. */
  readonly sm: Int32Array | null;
  readonly slot: Int32Array;
  readonly instruction: Int32Array;
  readonly cause: Int32Array;
  readonly causeChannel: Int32Array;
  readonly times: readonly Float64Array[];
  readonly lanes: readonly Lane[];
  /** When the results of each record were stored. The consumers may have turned to the next one before. */
  readonly stored: Float64Array;
  /** The different instruction kinds, phases and labels of all programs, and each record's number among them. */
  readonly kinds: readonly string[];
  readonly phases: readonly string[];
  readonly labels: readonly string[];
  readonly kind: Uint16Array;
  readonly phase: Uint16Array;
  readonly label: Counts;
  readonly layer: Int32Array;
  readonly bytes: Counts;
  readonly loadBytes: Counts;
  /** End of the last event. */
  readonly end: number;
  private readonly instances: (Int32Array | undefined)[] = [];

  /** `file` keeps the bytes of `buffer`, outside of the memory of the page: the trace holds on to none of them. */
  constructor(
    buffer: ArrayBuffer,
    readonly name: string,
    readonly file: Blob,
  ) {
    const columns = new Safetensors(buffer);
    const header = (this.header = readHeader(columns));
    this.machine = readMachine(header);
    const model = asObject(header["model"]);
    this.model = asText(model["name"]);
    this.events = asList(header["events"]).map((e) => {
      const { name, role, help } = asObject(e);
      return { name: String(name), role: String(role), help: String(help ?? "") };
    });
    const headers = asList(header["programs"]);
    this.programs = headers.map((h, p) => new Program(p, h, columns));

    this.stepProgram = columns.int32("step.program", null);
    this.steps = this.stepProgram.length;
    const numbers = columns.int64("step.number", this.steps);
    this.stepNumber = Float64Array.from({ length: this.steps }, (_, s) => int64At(numbers, s));
    this.stepTokens = columns.int32("step.tokens", this.steps);
    const optional = (name: string): Int32Array | null => (columns.has(name) ? columns.int32(name, this.steps) : null);
    this.stepSequences = optional("step.sequences");
    this.stepPromptRows = optional("step.prompt_rows");
    for (const program of this.stepProgram) {
      if (program < 0 || program >= this.programs.length) {
        throw new FileError(`The file is damaged: a step has program ${program} of ${this.programs.length}.`);
      }
    }

    const fileStep = columns.int32("record.step", null);
    const count = (this.count = fileStep.length);
    if (count === 0) throw new FileError("The trace is empty: it has no records.");
    let fileWorker = columns.int32("record.worker", count);
    const fileInstruction = columns.int32("record.instruction", count);
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
    this.sm = columns.has("record.sm") ? gather(columns.int32("record.sm", count)) : null;
    for (const sm of this.sm ?? []) {
      if (sm < -1 || sm >= MAX_SMS) throw new FileError(`The file is damaged: a record has SM ${sm} of ${MAX_SMS}.`);
    }
    this.slot = gather(columns.int32("record.slot", count));
    this.instruction = gather(fileInstruction);
    const cause = gather(columns.int32("record.cause", count));
    this.causeChannel = gather(columns.int32("record.cause_channel", count));
    this.checkRecords(cause);
    this.cause = cause.map((c) => (c < 0 ? -1 : this.byFile[c]!));
    this.times = this.readTimes(columns);

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
      const phaseNumbers = program.labels.map((l) => phases.number(isolate(phaseOf(l))));
      const labelNumbers = program.labels.map((l) => labels.number(isolate(l)));
      for (let i = 0; i < program.count; i++) {
        const l = program.label[i]!;
        kind[i] = kinds.number(isolate(program.opcode(i).name));
        phase[i] = phaseNumbers[l]!;
        label[i] = labelNumbers[l]!;
        layer[i] = layers[l]!;
      }
      for (let i = 0; i < program.count; i++) learnPhase(phases.list[phase[i]!]!, kinds.list[kind[i]!]!);
      return { kind, phase, label, layer, bytes: program.bytes, loadBytes: program.loadBytes };
    });
    this.kinds = kinds.list;
    this.phases = phases.list;
    this.labels = labels.list;
    this.kind = new Uint16Array(count);
    this.phase = new Uint16Array(count);
    this.label = makeCounts(count, labels.list.length);
    this.layer = new Int32Array(count);
    const most = this.programs.reduce((high, program) => program.bytes.reduce((a, b) => Math.max(a, b), high), 0);
    this.bytes = makeCounts(count, most);
    this.loadBytes = makeCounts(count, most);
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

    this.stored = storedTimes(this);
    this.lanes = makeLanes(ROLES.length, this, this.stored);
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

  private readTimes(columns: Safetensors): Float64Array[] {
    const words = columns.int64("times", this.events.length, this.count);
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
  readonly timesOf = (event: string): Float64Array | null => {
    const index = this.events.findIndex((e) => e.name === event);
    return index < 0 ? null : this.times[index]!;
  };

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
    if (this.unknownWorker && worker === this.workers - 1) return "unknown";
    return this.ranks > 1 ? `${this.rankOf(worker)}:${this.workerOfRank(worker)}` : String(worker);
  }

  /** The number of a worker among those of its rank. */
  workerOfRank(worker: number): number {
    return worker % this.workersPerRank;
  }

  /** The name of an SM: its number, after that of its rank where there are several. */
  smName(rank: number, sm: number): string {
    return this.ranks > 1 ? `${rank}:${sm}` : String(sm);
  }

  /** A number for the SM of a record that no SM of another rank has; -1: unknown. */
  smPlace(record: number): number {
    const sm = this.sm?.[record] ?? -1;
    return sm < 0 ? -1 : (this.rankOf(this.worker[record]!) ?? 0) * MAX_SMS + sm;
  }

  smPlaceName(place: number): string {
    return place < 0 ? "unknown" : this.smName(Math.floor(place / MAX_SMS), place % MAX_SMS);
  }

  get ranks(): number {
    return this.programs.reduce((most, program) => Math.max(most, program.ranks), 1);
  }

  get workersPerRank(): number {
    return Math.max(1, Math.floor((this.workers - (this.unknownWorker ? 1 : 0)) / this.ranks));
  }

  /** The rank of a worker; undefined for the unknown one. */
  rankOf(worker: number): number | undefined {
    return this.unknownWorker && worker === this.workers - 1 ? undefined : Math.floor(worker / this.workersPerRank);
  }

  programOf(record: number): Program {
    return this.programs[this.stepProgram[this.step[record]!]!]!;
  }

  /** Whether the cause of a record came by tagged words. */
  byWords(record: number): boolean {
    const channel = this.causeChannel[record]!;
    return this.cause[record]! >= 0 && channel >= 0 && this.programOf(record).channelKind[channel] === 1;
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
