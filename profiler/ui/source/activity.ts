/** What happens over time: bytes streamed, and how many workers compute, load and wait. */

import { BARRIER, COMPUTING, CONSUMER, LOADER, LOADING, type State, WORDS } from "./roles.ts";
import type { Trace } from "./trace.ts";

const MAX_BINS = 1 << 17;
/** The states that are counted, from the bottom of the track up. */
export const STACK: readonly State[] = [COMPUTING, LOADING, BARRIER, WORDS];

/** Amounts spread over intervals of time, in equal bins; a query gives the mean rate between two times. */
class Bins {
  private readonly whole: Float64Array;
  private readonly partial: Float64Array;
  private total: Float64Array | null = null;
  private readonly scale: number;

  constructor(
    private readonly begin: number,
    end: number,
    private readonly size: number,
  ) {
    this.scale = size / (end - begin);
    this.whole = new Float64Array(size + 1);
    this.partial = new Float64Array(size);
  }

  /** Something that happens at `rate` from a to b. */
  add(a: number, b: number, rate: number): void {
    const x0 = Math.max(0, (a - this.begin) * this.scale);
    const x1 = Math.min(this.size, (b - this.begin) * this.scale);
    if (!(x1 > x0)) return;
    const i0 = Math.min(this.size - 1, Math.floor(x0));
    const i1 = Math.floor(x1);
    if (i0 === i1) {
      this.partial[i0]! += rate * (x1 - x0);
      return;
    }
    this.partial[i0]! += rate * (i0 + 1 - x0);
    this.whole[i0 + 1]! += rate;
    this.whole[i1]! -= rate;
    if (i1 < this.size) this.partial[i1]! += rate * (x1 - i1);
  }

  /** Sum of everything from the begin up to a time, in rate times bins. */
  private upTo(time: number): number {
    if (this.total === null) {
      const total = (this.total = new Float64Array(this.size + 1));
      let level = 0;
      for (let i = 0; i < this.size; i++) {
        level += this.whole[i]!;
        total[i + 1] = total[i]! + level + this.partial[i]!;
      }
    }
    const x = Math.max(0, Math.min(this.size, (time - this.begin) * this.scale));
    const i = Math.min(this.size - 1, Math.floor(x));
    return this.total[i]! + (x - i) * (this.total[i + 1]! - this.total[i]!);
  }

  mean(a: number, b: number): number {
    return b > a ? (this.upTo(b) - this.upTo(a)) / ((b - a) * this.scale) : 0;
  }
}

/** Rates at points in time. */
export interface Samples {
  /** Streamed bytes per nanosecond. */
  readonly bandwidth: Float64Array;
  /** Workers in each state but idle. */
  readonly states: readonly Float64Array[];
}

class Window {
  readonly bandwidth: Bins;
  readonly states: readonly Bins[];

  constructor(trace: Trace, begin: number, end: number, size: number) {
    this.bandwidth = new Bins(begin, end, size);
    this.states = STACK.map(() => new Bins(begin, end, size));
    for (let worker = 0; worker < trace.workers; worker++) {
      sweepStates(trace, worker, begin, end, (state, a, b) => this.states[state]!.add(a, b, 1));
      sweepBytes(trace, worker, begin, end, (a, b, bytes) => this.bandwidth.add(a, b, bytes / (b - a)));
    }
  }
}

export class Activity {
  private readonly whole: Window;
  private readonly bin: number;

  constructor(private readonly trace: Trace) {
    const size = Math.max(1024, Math.min(MAX_BINS, 4 * Math.ceil(trace.count / trace.workers) * 4));
    this.whole = new Window(trace, 0, trace.end, size);
    this.bin = trace.end / size;
  }

  /** `count` samples between two times. */
  sample(begin: number, end: number, count: number): Samples {
    const step = (end - begin) / count;
    const window =
      step >= this.bin ? this.whole : new Window(this.trace, begin, Math.max(end, begin + 1e-6), count);
    const read = (bins: Bins): Float64Array => {
      const out = new Float64Array(count);
      for (let i = 0; i < count; i++) out[i] = bins.mean(begin + i * step, begin + (i + 1) * step);
      return out;
    };
    return { bandwidth: read(window.bandwidth), states: window.states.map(read) };
  }
}

/** What a worker's consumers do between two times, in order; what is left out is idle. */
export function sweepStates(
  trace: Trace,
  worker: number,
  begin: number,
  end: number,
  emit: (state: State, a: number, b: number) => void,
): void {
  const lane = trace.lanes[CONSUMER]!;
  const [b, w, i, l, , e] = lane.edges as readonly Float64Array[] as [
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
    Float64Array,
  ];
  const last = trace.workerOffsets[worker + 1]!;
  // Spans of a worker do not overlap; where they do in a file, time counts once.
  let cursor = begin;
  for (let r = trace.firstAfter(lane, worker, begin); r < last; r++) {
    if (b[r]! >= end) break;
    const to = Math.min(end, e[r]!);
    if (b[r]! < 0 || to <= cursor) continue;
    let from = Math.max(cursor, b[r]!);
    cursor = to;
    const waited = Math.min(w[r]!, to);
    if (waited > from) emit(BARRIER, from, waited), (from = waited);
    const inputs = Math.min(i[r]!, to);
    if (inputs > from) emit(WORDS, from, inputs), (from = inputs);
    const loaded = Math.min(l[r]!, to);
    if (loaded > from) emit(LOADING, from, loaded), (from = loaded);
    if (to > from) emit(COMPUTING, from, to);
  }
}

/**
 * When the streamed bytes of a worker's records move: while their loads are in flight, or from inputs to end where
 * the machine has no loader. Intervals that overlap a window are given whole.
 */
export function sweepBytes(
  trace: Trace,
  worker: number,
  begin: number,
  end: number,
  emit: (a: number, b: number, bytes: number, record: number) => void,
): void {
  const consumer = trace.lanes[CONSUMER]!;
  const loader = trace.lanes[LOADER]!;
  const last = trace.workerOffsets[worker + 1]!;
  const put = (a: number, b: number, record: number): void => {
    const to = Math.max(b, a + 1);
    if (a >= 0 && to > begin && a < end) emit(a, to, trace.loadBytes[record]!, record);
  };
  const loads = loader.used ? loader.edges[0]! : null;
  for (let r = trace.firstAfter(consumer, worker, begin); r < last; r++) {
    if (consumer.search[r]! >= end) break;
    if (trace.loadBytes[r]! > 0 && (loads === null || loads[r]! < 0)) {
      put(consumer.edges[2]![r]!, consumer.edges[5]![r]!, r);
    }
  }
  if (loads === null) return;
  const loaded = loader.edges[2]!;
  for (let r = trace.firstAfter(loader, worker, begin); r < last; r++) {
    if (loader.search[r]! >= end) break;
    if (trace.loadBytes[r]! > 0) put(loads[r]!, loaded[r]!, r);
  }
}
