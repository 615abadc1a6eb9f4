/**
 * The summary that a trace's file has: megavm computed it when it wrote the file (profiler/summary.py), so that the page
 * says what the reports say. It is text from a file: what has the wrong type or names nothing counts as absent.
 */

import { type Json, asList, asObject, asText } from "./json.ts";
import type { Trace } from "./trace.ts";

/** Version 1 has no `best`, version 2 no rates of weights and KV by kind. */
const VERSIONS = [1, 2, 3];
const MAX_ROWS = 1000;
const MAX_TEXT = 400;
const LATE = { count: "count", of: "of" };

export interface Outlier {
  /** Index of the step. */
  readonly step: number;
  readonly time: number;
  readonly ratio: number;
  readonly phase: string;
  readonly part: string;
  readonly more: number;
}

export interface Wait {
  readonly record: number;
  readonly label: string;
  readonly worker: number;
  readonly time: number;
  readonly lastLabel: string;
  readonly lastWorker: number;
  /** How many waited for the same. */
  readonly count: number;
}

/** Who came last, how often, of how many waits. */
interface Late {
  readonly count: number;
  readonly of: number;
}

export interface LateWorker extends Late {
  readonly worker: number;
}

/** What an SM did in all steps like this one. */
export interface Sm extends Late {
  readonly rank: number;
  readonly sm: number;
  /** Computing and loading in a step, that over the mean of all SMs, and over what its instructions take on average. */
  readonly time: number;
  readonly ofMean: number;
  readonly equalWork: number;
}

/** The rank that came last most often in an exchange between ranks. */
export interface LateRank extends Late {
  readonly phase: string;
  readonly rank: number;
  readonly time: number;
  /** That part of the time in which workers waited for another rank than their own. */
  readonly peerTime: number;
  /** How much of it was for each rank; empty in older files. */
  readonly ofRanks: readonly number[];
}

export interface Kind {
  readonly name: string;
  readonly total: number;
  readonly flopsPerByte: number;
  /** GB/s and GFLOP/s of workers that do nothing else. */
  readonly bytes: number;
  readonly flops: number;
  /** Of the bytes those of weights and KV; null in older files. */
  readonly streamed: number | null;
}

/** The links of a critical path that are of one phase: ns. */
export interface PathPhase {
  readonly phase: string;
  readonly time: number;
  /** Until its inputs are there: delay and latency. */
  readonly waiting: number;
  readonly loading: number;
  /** With signalling. */
  readonly computing: number;
}

export interface Change {
  readonly text: string;
  readonly what: string;
  readonly of: string;
  readonly time: number;
  readonly saved: number;
  readonly memoryBound: boolean;
}

export interface WhatIf {
  readonly recorded: number;
  readonly replayed: number;
  /** What the memory needs for the bytes of the step; 0: it is not known. */
  readonly memory: number;
  readonly changes: readonly Change[];
}

export interface Summary {
  readonly sentence: string;
  /** Index of the step that it is of. */
  readonly step: number;
  readonly time: number;
  readonly warnings: readonly string[];
  /** The critical path by phase, longest first. */
  readonly path: readonly PathPhase[];
  /** The changes that would bring most, of those that could be made. */
  readonly best: readonly Change[];
  readonly outliers: readonly Outlier[];
  readonly waits: readonly Wait[];
  readonly lateWorkers: readonly LateWorker[];
  readonly lateRanks: readonly LateRank[];
  /** In the order of their numbers, so that the two of a TPC are neighbours. */
  readonly sms: readonly Sm[];
  /** A sentence on SMs that are slow in all steps, or nothing. */
  readonly slowSms: string;
  /** What every worker computes and loads, and how long it waits. */
  readonly busy: readonly number[];
  readonly waiting: readonly number[];
  readonly kinds: readonly Kind[];
  /** A sentence where there is none. */
  readonly whatIf: WhatIf | string;
}

function numberOf(value: unknown): number {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}

/** Numbers of a row: their names in the file, by their names here. */
function numbersOf<Name extends string>(row: Json, names: Readonly<Record<Name, string>>): Record<Name, number> {
  const found = Object.entries<string>(names).map(([own, name]) => [own, numberOf(row[name])] as const);
  return Object.fromEntries(found) as Record<Name, number>;
}

function textOf(value: unknown): string {
  return asText(value).slice(0, MAX_TEXT);
}

function rowsOf(value: unknown): Json[] {
  return asList(value).slice(0, MAX_ROWS).map(asObject);
}

/** A phase without the layers that it is in, as the page calls it. */
export function shortName(name: string): string {
  return name.replace(/^(?:.*\.)?layers\.\*\./, "");
}

/** The summary of a trace; null: its file has none that this page knows. */
export function readSummary(trace: Trace): Summary | null {
  const found = asObject(trace.header["summary"]);
  if (!VERSIONS.includes(numberOf(found["version"]))) return null;
  const step = trace.stepNumber.indexOf(numberOf(found["step"]));
  if (step < 0) return null;
  const states = asObject(found["workers"]);
  const state = (name: string): number[] => asList(states[name]).slice(0, trace.workers).map(numberOf);
  const [computing, loading, barrier, words] = ["computing", "loading", "barrier", "words"].map(state) as [
    number[],
    number[],
    number[],
    number[],
  ];
  return {
    sentence: textOf(found["sentence"]),
    step,
    time: numberOf(found["step_ns"]),
    warnings: asList(found["warnings"]).slice(0, 20).map(textOf),
    path: rowsOf(found["critical_path"]).map((row) => {
      const own = numbersOf(row, { time: "ns", delay: "delay", latency: "latency", loading: "loading", computing: "computing", signalling: "signalling" });
      const { time, loading, delay, latency, computing, signalling } = own;
      return { phase: shortName(textOf(row["phase"])), time, waiting: delay + latency, loading, computing: computing + signalling };
    }),
    best: rowsOf(found["best"]).map(readChange),
    outliers: readOutliers(trace, found),
    waits: readWaits(trace, found),
    lateWorkers: rowsOf(found["late_workers"])
      .map((row) => numbersOf(row, { ...LATE, worker: "worker" }))
      .filter(({ worker, of }) => isIndex(worker, trace.workers) && of > 0),
    lateRanks: rowsOf(found["late_ranks"])
      .map((row) => ({
        phase: shortName(textOf(row["phase"])),
        ofRanks: rowsOf(row["ranks"]).map((own) => numberOf(own["peer_ns"])),
        ...numbersOf(row, { ...LATE, rank: "rank", time: "ns", peerTime: "peer_ns" }),
      }))
      .filter(({ rank, of }) => isIndex(rank, trace.ranks) && of > 0),
    sms: rowsOf(found["sms"])
      .map((row) => numbersOf(row, { ...LATE, rank: "rank", sm: "sm", time: "ns", ofMean: "of_mean", equalWork: "equal_work" }))
      .filter(({ rank, of }) => isIndex(rank, trace.ranks) && of >= 0),
    slowSms: textOf(found["slow_sms"]),
    busy: computing.map((time, w) => time + (loading[w] ?? 0)),
    waiting: barrier.map((time, w) => time + (words[w] ?? 0)),
    kinds: rowsOf(found["kinds"]).map((row) => {
      const { bytes, flops, ...own } = numbersOf(row, {
        total: "total",
        flopsPerByte: "flops_per_byte",
        bytes: "bytes_per_second",
        flops: "flops_per_second",
      });
      const streamed = "streamed_per_second" in row ? numberOf(row["streamed_per_second"]) / 1e9 : null;
      return { name: textOf(row["kind"]), ...own, bytes: bytes / 1e9, flops: flops / 1e9, streamed };
    }),
    whatIf: readWhatIf(found["what_if"]),
  };
}

function isIndex(value: number, count: number): boolean {
  return Number.isInteger(value) && value >= 0 && value < count;
}

function readOutliers(trace: Trace, found: Json): Outlier[] {
  return rowsOf(found["outliers"])
    .map((row) => ({
      ...numbersOf(row, { time: "ns", ratio: "ratio", more: "more_ns" }),
      step: trace.stepNumber.indexOf(numberOf(row["step"])),
      phase: shortName(textOf(row["phase"])),
      part: textOf(row["part"]),
    }))
    .filter(({ step }) => step >= 0);
}

function readWaits(trace: Trace, found: Json): Wait[] {
  return rowsOf(found["waits"])
    .map((row) => ({
      ...numbersOf(row, { record: "record", worker: "worker", time: "ns", lastWorker: "last_worker", count: "count" }),
      label: textOf(row["label"]),
      lastLabel: textOf(row["last_label"]),
    }))
    .filter(({ record }) => isIndex(record, trace.count))
    .map((wait) => ({ ...wait, record: trace.byFile[wait.record]! }));
}

function readWhatIf(found: unknown): WhatIf | string {
  if (typeof found === "string") return textOf(found);
  const facts = asObject(found);
  return {
    ...numbersOf(facts, { recorded: "step_ns", replayed: "replayed_ns", memory: "memory_ns" }),
    changes: rowsOf(facts["changes"]).map(readChange),
  };
}

function readChange(row: Json): Change {
  return {
    ...numbersOf(row, { time: "ns", saved: "saved_ns" }),
    text: textOf(row["text"]),
    what: textOf(row["what"]),
    of: textOf(row["of"]),
    memoryBound: row["memory_bound"] === true,
  };
}
