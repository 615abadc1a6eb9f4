/** The header of a trace: what the run was of. */

import { type Json, asObject, asText } from "./json.ts";
import { FileError, type Safetensors, quote } from "./safetensors.ts";

const FORMAT = "megavm-trace";
const VERSION = "1";

export interface Machine {
  readonly name: string;
  readonly device: string;
  /** Bytes per nanosecond (GB/s) that the memory can give; null: unknown. */
  readonly bandwidth: number | null;
  /** Floating-point operations per nanosecond (GFLOP/s) of a large matrix product; null: unknown. */
  readonly flops: number | null;
}

/** Checks the format and its version, and gives the header's members. */
export function readHeader(file: Safetensors): Json {
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
      return header as Json;
    }
  } catch {
    // Said below.
  }
  throw new FileError("The file is damaged: the header of the trace is not a JSON object.");
}

export function readMachine(header: Json): Machine {
  const machine = asObject(header["machine"]);
  const perNanosecond = (name: string): number | null => {
    const value = machine[name];
    return typeof value === "number" && Number.isFinite(value) && value > 0 ? value / 1e9 : null;
  };
  return {
    name: asText(machine["name"]),
    device: asText(machine["device"]),
    bandwidth: perNanosecond("bandwidth"),
    flops: perNanosecond("flops_per_second"),
  };
}
