/** Reads the container of a trace: the length of a JSON header, the header, then columns of numbers. */

/** What is wrong with a file or a request, in one sentence for the page. */
export class FileError extends Error {}

export type DType = "I32" | "I64" | "U32";

interface Entry {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

const WIDTHS: Readonly<Record<DType, number>> = { I32: 4, I64: 8, U32: 4 };

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isSize(value: unknown): value is number {
  return typeof value === "number" && Number.isSafeInteger(value) && value >= 0;
}

/** The named columns of a file and its strings of metadata. */
export class Safetensors {
  readonly metadata: ReadonlyMap<string, string>;
  private readonly entries: ReadonlyMap<string, Entry>;
  private readonly start: number;

  constructor(private readonly buffer: ArrayBuffer) {
    const view = new DataView(buffer);
    if (buffer.byteLength < 8) {
      throw new FileError(`The file has ${buffer.byteLength} bytes: too short for a trace.`);
    }
    const length = view.getUint32(0, true) + view.getUint32(4, true) * 2 ** 32;
    if (length > buffer.byteLength - 8) {
      throw new FileError(
        `The file is truncated, or not a trace: its header would have ${length} bytes, but ` +
          `${buffer.byteLength - 8} follow.`,
      );
    }
    this.start = 8 + length;
    let header: unknown;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 8, length));
      header = JSON.parse(text);
    } catch {
      throw new FileError("The file is not a trace: its header is not JSON.");
    }
    if (!isObject(header)) throw new FileError("The file is not a trace: its header is not an object.");
    const metadata = new Map<string, string>();
    const entries = new Map<string, Entry>();
    for (const [name, value] of Object.entries(header)) {
      if (name === "__metadata__") {
        for (const [key, text] of Object.entries(isObject(value) ? value : {})) {
          if (typeof text === "string") metadata.set(key, text);
        }
      } else {
        entries.set(name, this.entry(name, value));
      }
    }
    this.metadata = metadata;
    this.entries = entries;
  }

  private entry(name: string, value: unknown): Entry {
    const shape: unknown = isObject(value) ? value["shape"] : undefined;
    const offsets: unknown = isObject(value) ? value["data_offsets"] : undefined;
    const dtype: unknown = isObject(value) ? value["dtype"] : undefined;
    if (
      typeof dtype !== "string" ||
      !Array.isArray(shape) ||
      !shape.every(isSize) ||
      !Array.isArray(offsets) ||
      offsets.length !== 2 ||
      !offsets.every(isSize) ||
      offsets[0] > offsets[1]
    ) {
      throw new FileError(`The file is damaged: the column ${quote(name)} is not described.`);
    }
    if (this.start + offsets[1] > this.buffer.byteLength) {
      throw new FileError(`The file is truncated: the column ${quote(name)} ends after the file.`);
    }
    return { dtype, shape, begin: offsets[0], end: offsets[1] };
  }

  private find(name: string, dtype: DType, shape: readonly (number | null)[]): Entry {
    const entry = this.entries.get(name);
    if (entry === undefined) throw new FileError(`The file is damaged: the column ${quote(name)} is missing.`);
    const fits =
      entry.dtype === dtype &&
      entry.shape.length === shape.length &&
      shape.every((size, axis) => size === null || size === entry.shape[axis]);
    const size = entry.shape.reduce((product, n) => product * n, 1) * WIDTHS[dtype];
    if (!fits || size !== entry.end - entry.begin) {
      const wanted = shape.map((n) => n ?? "any").join(", ");
      throw new FileError(
        `The file is damaged: the column ${quote(name)} is ${entry.dtype} [${entry.shape.join(", ")}] in ` +
          `${entry.end - entry.begin} bytes, expected ${dtype} [${wanted}].`,
      );
    }
    return entry;
  }

  /** The bytes of a column: a copy, so that a column does not keep the whole file in memory. */
  private bytes(entry: Entry): ArrayBuffer {
    return this.buffer.slice(this.start + entry.begin, this.start + entry.end);
  }

  has(name: string): boolean {
    return this.entries.has(name);
  }

  /** Number of entries along the first axis of a column. */
  length(name: string): number {
    const entry = this.entries.get(name);
    if (entry === undefined) throw new FileError(`The file is damaged: the column ${quote(name)} is missing.`);
    return entry.shape[0] ?? 0;
  }

  int32(name: string, ...shape: (number | null)[]): Int32Array {
    return new Int32Array(this.bytes(this.find(name, "I32", shape)));
  }

  uint32(name: string, ...shape: (number | null)[]): Uint32Array {
    return new Uint32Array(this.bytes(this.find(name, "U32", shape)));
  }

  /** 64-bit integers as pairs of 32-bit words, low word first: see `int64At`. In place if they are aligned. */
  int64(name: string, ...shape: (number | null)[]): Int32Array {
    const entry = this.find(name, "I64", shape);
    const offset = this.start + entry.begin;
    if (offset % 4 !== 0) return new Int32Array(this.bytes(entry));
    return new Int32Array(this.buffer, offset, (entry.end - entry.begin) / 4);
  }
}

/** Entry `index` of a column of 64-bit integers, rounded to 53 bits. */
export function int64At(words: Int32Array, index: number): number {
  return words[2 * index + 1]! * 4294967296 + (words[2 * index]! >>> 0);
}

/** A name from a file as it stands in a sentence: short, and without control characters. */
export function quote(name: string): string {
  const clean = name.replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "?");
  return `"${clean.length > 60 ? clean.slice(0, 57) + "..." : clean}"`;
}
