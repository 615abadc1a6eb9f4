/** A program of a trace: instructions, labels, and the channels through which they depend on each other. */

import { type Json, asList, asObject, asText } from "./json.ts";
import { isolate } from "./names.ts";
import { FileError, type Safetensors, int64At, quote } from "./safetensors.ts";

export const WORDS = 32;
export const NONE = 0xffffffff;
const SIGNAL_WORD = 1;

export interface FieldInfo {
  readonly name: string;
  readonly word: number;
  readonly kind: string;
}

export interface Opcode {
  readonly name: string;
  readonly help: string;
  readonly fields: readonly FieldInfo[];
}

export interface TensorInfo {
  readonly name: string;
  readonly shape: string;
  readonly dtype: string;
  readonly kind: string;
}

/** Number of the layer in a label such as "layers.3.down_proj"; -1: none. */
export function layerOf(label: string): number {
  const found = /(?:^|\.)layers\.(\d{1,6})(?:\.|$)/.exec(label);
  return found ? Number(found[1]) : -1;
}

/** The phase of a label: what is alike in all layers, "down_proj" in "layers.3.down_proj". */
export function phaseOf(label: string): string {
  return label.replace(/^(?:.*\.)?layers\.\d+\./, "").replace(/\d+/g, "*") || "unnamed";
}

function checkRange(values: Int32Array, low: number, high: number, name: string): void {
  for (let i = 0; i < values.length; i++) {
    const value = values[i]!;
    if (value < low || value >= high) {
      throw new FileError(
        `The file is damaged: ${quote(name)} has ${value} at ${i}, expected ${low} to ${high - 1}.`,
      );
    }
  }
}

export class Program {
  readonly fingerprint: string;
  readonly dynamic: boolean;
  /** Of all ranks. */
  readonly workers: number;
  readonly ranks: number;
  readonly barriers: readonly string[];
  readonly tensors: readonly TensorInfo[];
  readonly labels: readonly string[];
  readonly opcodes: ReadonlyMap<number, Opcode>;
  readonly metadata: Json;
  readonly words: Uint32Array;
  readonly label: Int32Array;
  readonly count: number;
  readonly bytes: Float64Array;
  readonly loadBytes: Float64Array;
  readonly flops: Float64Array;
  readonly channelKind: Int32Array;
  readonly channelObject: Int32Array;
  readonly channelTarget: Int32Array;
  readonly channelOffsets: Int32Array;
  readonly channelProducers: Int32Array;
  /** Waits as rows of (instruction, channel, steps back). */
  readonly waits: Int32Array;
  private incoming: readonly number[][] | undefined;
  private outgoing: readonly number[][] | undefined;

  constructor(
    readonly number: number,
    header: unknown,
    file: Safetensors,
  ) {
    const info = asObject(header);
    const column = (name: string): string => `program.${number}.${name}`;
    this.fingerprint = asText(info["fingerprint"]);
    this.dynamic = info["dynamic"] === true;
    this.workers = typeof info["workers"] === "number" ? info["workers"] : 0;
    const ranks = info["ranks"];
    this.ranks = typeof ranks === "number" && Number.isInteger(ranks) && ranks > 1 && this.workers % ranks === 0 ? ranks : 1;
    this.metadata = asObject(info["metadata"]);
    this.barriers = asList(info["barriers"]).map((b) => isolate(asText(b)));
    this.labels = asList(info["labels"]).map((l) => asText(l));
    this.tensors = asList(info["tensors"]).map((t) => {
      const parts = asList(t);
      return {
        name: isolate(asText(parts[0], "unnamed")),
        shape: asList(parts[1]).filter((n) => typeof n === "number").join(" x "),
        dtype: asText(parts[2]),
        kind: asText(parts[3]),
      };
    });
    this.opcodes = readOpcodes(info["opcodes"]);

    this.words = file.uint32(column("words"), null, WORDS);
    const n = (this.count = this.words.length / WORDS);
    this.label = file.int32(column("label"), n);
    checkRange(this.label, 0, this.labels.length, column("label"));
    const numbers = (name: string): Float64Array => {
      const words = file.int64(column(name), n);
      return Float64Array.from({ length: n }, (_, i) => Math.max(0, int64At(words, i)));
    };
    this.bytes = numbers("bytes");
    this.loadBytes = numbers("load_bytes");
    this.flops = numbers("flops");

    this.channelKind = file.int32(column("channel_kind"), null);
    const c = this.channelKind.length;
    this.channelObject = file.int32(column("channel_object"), c);
    this.channelTarget = file.int32(column("channel_target"), c);
    this.channelOffsets = file.int32(column("channel_offsets"), c + 1);
    this.channelProducers = file.int32(column("channel_producers"), null);
    checkRange(this.channelProducers, 0, n, column("channel_producers"));
    let before = 0;
    for (const offset of this.channelOffsets) {
      if (offset < before || offset > this.channelProducers.length) {
        throw new FileError(`The file is damaged: ${quote(column("channel_offsets"))} are not in order.`);
      }
      before = offset;
    }
    this.waits = file.int32(column("waits"), null, 3);
    for (let i = 0; i < this.waits.length; i += 3) {
      const [instruction, channel, back] = [this.waits[i]!, this.waits[i + 1]!, this.waits[i + 2]!];
      if (instruction < 0 || instruction >= n || channel < 0 || channel >= c || back < 0) {
        throw new FileError(`The file is damaged: wait ${i / 3} of ${quote(column("waits"))} names nothing.`);
      }
    }
  }

  word(instruction: number, word: number): number {
    return this.words[instruction * WORDS + word] ?? 0;
  }

  opcode(instruction: number): Opcode {
    const number = this.word(instruction, 0);
    return this.opcodes.get(number) ?? { name: `opcode ${number}`, help: "", fields: [] };
  }

  labelOf(instruction: number): string {
    return this.labels[this.label[instruction]!] ?? "";
  }

  tensor(handle: number): TensorInfo | undefined {
    return this.tensors[handle];
  }

  /** The barrier that an instruction signals, by name. */
  signal(instruction: number): string | null {
    const barrier = this.word(instruction, SIGNAL_WORD);
    return barrier === NONE ? null : this.barrierName(barrier);
  }

  barrierName(barrier: number): string {
    return this.barriers[barrier] || `barrier ${barrier}`;
  }

  /** What a channel is, for people: its barrier and target, or its tagged tensor. */
  channelName(channel: number): string {
    const object = this.channelObject[channel]!;
    if (this.channelKind[channel] === 1) return this.tensor(object)?.name ?? `tensor ${object}`;
    return this.barrierName(object);
  }

  producers(channel: number): Int32Array {
    return this.channelProducers.subarray(this.channelOffsets[channel]!, this.channelOffsets[channel + 1]!);
  }

  /** Rows of `waits` of an instruction. */
  waitsOf(instruction: number): readonly number[] {
    if (this.incoming === undefined) {
      const found: number[][] = Array.from({ length: this.count }, () => []);
      for (let row = 0; 3 * row < this.waits.length; row++) found[this.waits[3 * row]!]!.push(row);
      this.incoming = found;
    }
    return this.incoming[instruction] ?? [];
  }

  /** Rows of `waits` that wait for an instruction. */
  waitersOf(instruction: number): readonly number[] {
    if (this.outgoing === undefined) {
      const rows: number[][] = Array.from({ length: this.channelKind.length }, () => []);
      for (let row = 0; 3 * row < this.waits.length; row++) rows[this.waits[3 * row + 1]!]!.push(row);
      this.outgoing = rows;
    }
    const found: number[] = [];
    for (let channel = 0; channel < this.channelKind.length; channel++) {
      if (this.outgoing[channel]!.length && this.producers(channel).includes(instruction)) {
        for (const row of this.outgoing[channel]!) found.push(row);
      }
    }
    return found;
  }
}

function readOpcodes(value: unknown): Map<number, Opcode> {
  const opcodes = new Map<number, Opcode>();
  for (const [number, info] of Object.entries(asObject(value))) {
    const { name, help, fields } = asObject(info);
    opcodes.set(Number(number), {
      name: asText(name, `opcode ${number}`),
      help: asText(help),
      fields: asList(fields).flatMap((field) => {
        const { name, word, kind } = asObject(field);
        const usable = typeof word === "number" && Number.isInteger(word) && word >= 0 && word < WORDS;
        return usable ? [{ name: asText(name, `word ${word}`), word, kind: asText(kind) }] : [];
      }),
    });
  }
  return opcodes;
}

const floats = new DataView(new ArrayBuffer(4));

/** The named operands of an instruction, as text. */
export function decode(program: Program, instruction: number): { name: string; value: string; help: string }[] {
  return program.opcode(instruction).fields.map(({ name, word, kind }) => {
    const bits = program.word(instruction, word);
    if (kind === "float") {
      floats.setUint32(0, bits);
      return { name, value: String(Number(floats.getFloat32(0).toPrecision(7))), help: "" };
    }
    if (kind !== "tensor") return { name, value: bits === NONE ? "none" : String(bits), help: "" };
    if (bits === NONE) return { name, value: "none", help: "" };
    const tensor = program.tensor(bits);
    if (tensor === undefined) return { name, value: `tensor ${bits}`, help: "" };
    return { name, value: tensor.name, help: `${tensor.dtype} ${tensor.shape}`.trim() };
  });
}
