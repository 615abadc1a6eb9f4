/**
 * The summary that a trace's file has: megavm computed it when it wrote the file (profiler/summary.py), so that the page
 * says what the reports say. It is text from a file: what has the wrong type or names nothing counts as absent.
 */

import { type Json, asList, asObject, asText } from "./json.ts";
import type { Trace } from "./trace.ts";

const VERSION = 1;
const MAX_ROWS = 1000;
const MAX_TEXT = 400;

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

export interface LateWorker {
  readonly worker: number;
  readonly count: number;
  readonly of: number;
}

/** The rank that came last most often in an exchange between ranks. */
export interface LateRank {
  readonly phase: string;
  readonly rank: number;
  readonly count: number;
  readonly of: number;
  readonly time: number;
  /** That part of the time in which workers waited for another rank than their own. */
  readonly peerTime: number;
}

export interface Kind {
  readonly name: string;
  readonly total: number;
  readonly flopsPerByte: number;
  /** GB/s and GFLOP/s of workers that do nothing else. */
  readonly bytes: number;
  readonly flops: number;
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
  readonly outliers: readonly Outlier[];
  readonly waits: readonly Wait[];
  readonly lateWorkers: readonly LateWorker[];
  readonly lateRanks: readonly LateRank[];
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
  if (found["version"] !== VERSION) return null;
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
    outliers: readOutliers(trace, found),
    waits: readWaits(trace, found),
    lateWorkers: rowsOf(found["late_workers"])
      .map((row) => ({ worker: numberOf(row["worker"]), count: numberOf(row["count"]), of: numberOf(row["of"]) }))
      .filter(({ worker, of }) => isIndex(worker, trace.workers) && of > 0),
    lateRanks: rowsOf(found["late_ranks"])
      .map((row) => ({
        phase: textOf(row["phase"]),
        rank: numberOf(row["rank"]),
        count: numberOf(row["count"]),
        of: numberOf(row["of"]),
        time: numberOf(row["ns"]),
        peerTime: numberOf(row["peer_ns"]),
      }))
      .filter(({ rank, of }) => isIndex(rank, trace.ranks) && of > 0),
    busy: computing.map((time, w) => time + (loading[w] ?? 0)),
    waiting: barrier.map((time, w) => time + (words[w] ?? 0)),
    kinds: rowsOf(found["kinds"]).map((row) => ({
      name: textOf(row["kind"]),
      total: numberOf(row["total"]),
      flopsPerByte: numberOf(row["flops_per_byte"]),
      bytes: numberOf(row["bytes_per_second"]) / 1e9,
      flops: numberOf(row["flops_per_second"]) / 1e9,
    })),
    whatIf: readWhatIf(found["what_if"]),
  };
}

function isIndex(value: number, count: number): boolean {
  return Number.isInteger(value) && value >= 0 && value < count;
}

function readOutliers(trace: Trace, found: Json): Outlier[] {
  return rowsOf(found["outliers"])
    .map((row) => ({
      step: trace.stepNumber.indexOf(numberOf(row["step"])),
      time: numberOf(row["ns"]),
      ratio: numberOf(row["ratio"]),
      phase: shortName(textOf(row["phase"])),
      part: textOf(row["part"]),
      more: numberOf(row["more_ns"]),
    }))
    .filter(({ step }) => step >= 0);
}

function readWaits(trace: Trace, found: Json): Wait[] {
  return rowsOf(found["waits"])
    .filter((row) => isIndex(numberOf(row["record"]), trace.count))
    .map((row) => {
      return {
        record: trace.byFile[numberOf(row["record"])]!,
        label: textOf(row["label"]),
        worker: numberOf(row["worker"]),
        time: numberOf(row["ns"]),
        lastLabel: textOf(row["last_label"]),
        lastWorker: numberOf(row["last_worker"]),
        count: numberOf(row["count"]),
      };
    });
}

function readWhatIf(found: unknown): WhatIf | string {
  if (typeof found === "string") return textOf(found);
  const facts = asObject(found);
  return {
    recorded: numberOf(facts["step_ns"]),
    replayed: numberOf(facts["replayed_ns"]),
    memory: numberOf(facts["memory_ns"]),
    changes: rowsOf(facts["changes"]).map((row) => ({
      text: textOf(row["text"]),
      what: textOf(row["what"]),
      of: textOf(row["of"]),
      time: numberOf(row["ns"]),
      saved: numberOf(row["saved_ns"]),
      memoryBound: row["memory_bound"] === true,
    })),
  };
}
