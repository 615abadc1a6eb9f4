/** Numbers as people read them. */

const TIME_UNITS: readonly (readonly [number, string])[] = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];

function significant(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3);
}

/** A length of time: "12.3 µs". */
export function duration(ns: number): string {
  if (!Number.isFinite(ns)) return "-";
  const size = Math.abs(ns);
  for (const [unit, name] of TIME_UNITS) {
    if (size >= unit && unit > 1) return `${significant(ns / unit)} ${name}`;
  }
  return `${Number.isInteger(ns) ? ns : significant(ns)} ns`;
}

/** A difference of times, with its sign: "+1.2 µs". */
export function signedDuration(ns: number): string {
  return ns > 0 ? `+${duration(ns)}` : ns < 0 ? `\u2212${duration(-ns)}` : "0";
}

/** A point in time with as many digits as a distance of `resolution` ns wants, in one unit. */
export function instant(ns: number, resolution: number): string {
  const unit = Math.abs(ns) >= 1e6 && resolution >= 1e4 ? 1e6 : Math.abs(ns) >= 1e3 || resolution >= 100 ? 1e3 : 1;
  const digits = Math.max(0, Math.min(6, Math.ceil(Math.log10(unit / resolution))));
  return `${(ns / unit).toFixed(digits)} ${unit === 1e6 ? "ms" : unit === 1e3 ? "µs" : "ns"}`;
}

function scaled(count: number, name: string): string {
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < 5) {
    value /= 1000;
    unit++;
  }
  return `${unit ? significant(value) : value.toFixed(0)} ${["", "K", "M", "G", "T", "P"][unit]}${name}`;
}

export function bytes(count: number): string {
  return scaled(count, "B");
}

/** Bytes per nanosecond are GB/s. */
export function rate(bytesPerNs: number): string {
  return Number.isFinite(bytesPerNs) ? scaled(1e9 * bytesPerNs, "B/s") : "-";
}

export function flops(perNs: number): string {
  return Number.isFinite(perNs) ? scaled(1e9 * perNs, "FLOP/s") : "-";
}

export function integer(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** A number of things: "1 row", "1,024 rows". */
export function counted(count: number, noun: string): string {
  return `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function percent(fraction: number): string {
  return Number.isFinite(fraction) ? `${(100 * fraction).toFixed(1)} %` : "-";
}

/** A share of the memory's bandwidth, and why it is above all of it: as profiler/summary.py says. */
export function ofCeiling(fraction: number, machine: string, ranks: number): string {
  const ofOneGpu = machine === "cuda" && fraction > 1.5 && fraction <= ranks;
  const why = ofOneGpu ? ", which seems to be that of one GPU" : fraction > 1 ? ", in part from caches" : "";
  return `${percent(fraction)} of ceiling${why}`;
}
