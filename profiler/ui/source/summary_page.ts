/** What a trace says at first sight. Everything in it leads to its place in the timeline. */

import type { App } from "./app.ts";
import { changesTable } from "./changes_table.ts";
import { type Rgb, colourOfName, css, word } from "./colour.ts";
import { button, make } from "./dom.ts";
import { duration, flops, integer, percent, rate, signedDuration } from "./format.ts";
import type { Machine } from "./header.ts";
import type { Pane } from "./pane.ts";
import type { Page } from "./panel.ts";
import { makeRoofline } from "./roofline.ts";
import { type Kind, type LateRank, type LateWorker, type Outlier, type PathPhase, type Sm, type Summary, type Wait, readSummary } from "./summary.ts";
import { type Column, makeTable } from "./table.ts";

const MAX_CELLS = 1024;
/** Ranks that have a column in the table of exchanges. */
const MAX_RANKS = 8;
/** Of more, the table has no column of all waits. */
const FEW_RANKS = 4;
/** SMs of the table: those that compute and load longest. */
const MAX_SMS = 8;
/** Times that differ less than by this part are shown as alike. */
const LEAST_SPREAD = 0.1;
const NO_SUMMARY = "This file has no summary that this page knows. “megavm trace view FILE” shows it with one.";

/** What a page says of the summary of every pane. */
export function ofPanes(panes: readonly Pane[], parts: (pane: Pane, found: Summary) => HTMLElement[]): HTMLElement[] {
  return panes.flatMap((pane) => {
    const found = readSummary(pane.trace);
    const title = panes.length > 1 ? [make("h2", "", `${pane.letter}: ${pane.trace.name}`)] : [];
    return [...title, ...(found === null ? [make("p", "hint", NO_SUMMARY)] : parts(pane, found))];
  });
}

/** A worker or SM in a strip, and the search that finds it. */
interface Cell {
  readonly name: string;
  readonly time: number;
  readonly query: string;
}

export class SummaryPage implements Page {
  readonly name = "Summary";
  readonly element = make("section", "page");
  private shown: readonly unknown[] = [];

  constructor(
    private readonly app: App,
    private readonly openWhatIf: () => void,
  ) {}

  render(): void {
    const { panes, theme } = this.app;
    const shown = [...panes.map((pane) => pane.trace), theme.dark];
    if (isSame(shown, this.shown)) return;
    this.shown = shown;
    this.element.replaceChildren(...ofPanes(panes, (pane, found) => this.parts(pane, found)));
  }

  private parts(pane: Pane, found: Summary): HTMLElement[] {
    const { app } = this;
    const { trace } = pane;
    const parts: HTMLElement[] = [
      make("p", "lead", found.sentence),
      ...found.warnings.map((text) => make("p", "note", text)),
      make(
        "div",
        "buttons",
        button(`Show step ${trace.stepNumber[found.step]}`, "the step of median duration", () => this.show(pane, found.step)),
        button("Its critical path", "the chain that made it as long as it is", () => {
          this.show(pane, found.step);
          app.setCritical(true);
        }),
        button("What would help", "the step with one thing changed", this.openWhatIf),
      ),
    ];
    if (found.outliers.length > 0) parts.push(make("h3", "", "Steps that took much longer"), this.outliers(pane, found));
    if (found.path.length > 0) parts.push(make("h3", "", "Where the time goes: the critical path of the step"), this.path(found));
    if (found.best.length > 0) parts.push(make("h3", "", "What would help most"), this.best(found));
    if (found.lateRanks.length > 0) parts.push(make("h3", "", "Exchanges between ranks: who came last"), this.lateRanks(found));
    if (found.lateWorkers.length > 0) parts.push(make("h3", "", "Who came last"), this.late(pane, found));
    if (found.waits.length > 0) parts.push(make("h3", "", "Longest waits"), this.waits(pane, found));
    parts.push(...this.strips(pane, found), ...this.sms(pane, found));
    const roofline = makeRoofline(found.kinds, trace.machine);
    if (roofline !== null) {
      const picture = make("div");
      picture.append(roofline);
      parts.push(
        make("h3", "", "Kinds of instruction: what workers that did nothing else would reach"),
        picture,
        this.kinds(found.kinds, trace.machine),
        make(
          "p",
          "faint",
          "The lines are what was measured of the machine: its memory's bandwidth and the rate of matrix products. What lies above them read from caches, loaded while the workers waited, or read less than it may: sample, where it takes the largest logit.",
        ),
      );
    }
    return parts;
  }

  private show(pane: Pane, step: number): void {
    if (this.app.panes.length > 1) this.app.alignStep(pane, step);
    else this.app.setStep(step, true);
  }

  private outliers(pane: Pane, { outliers }: Summary): HTMLElement {
    return makeTable<Outlier>(
      [
        { title: "step", text: (o) => String(pane.trace.stepNumber[o.step]), value: (o) => pane.trace.stepNumber[o.step]! },
        { title: "time", text: (o) => duration(o.time), value: (o) => o.time },
        { title: "of median", text: (o) => `${o.ratio.toFixed(2)} ×`, value: (o) => o.ratio },
        { title: "what grew most", text: (o) => `${o.phase}: ${o.part}`, help: "on its critical path, against that of the median step" },
        { title: "by", text: (o) => signedDuration(o.more), value: (o) => o.more },
      ],
      outliers,
      (o) => this.show(pane, o.step),
    );
  }

  private path({ path, time }: Summary): HTMLElement {
    const columns: Column<PathPhase>[] = [
      { title: "phase", text: (p) => p.phase, colour: (p) => css(colourOfName(p.phase)) },
      { title: "time", text: (p) => duration(p.time), value: (p) => p.time, bar: (p) => p.time / (path[0]?.time || 1) },
      { title: "share", text: (p) => percent(p.time / Math.max(1, time)), value: (p) => p.time, help: "of the step" },
      { title: "waits", text: (p) => duration(p.waiting), value: (p) => p.waiting, help: "until its inputs are there" },
      { title: "loads", text: (p) => duration(p.loading), value: (p) => p.loading, help: "from its inputs until its weights are there" },
      { title: "computes", text: (p) => duration(p.computing), value: (p) => p.computing, help: "and signals" },
    ];
    return makeTable(columns, path, (p) => this.app.search(`phase:${word(p.phase)}`));
  }

  private best({ best, time, whatIf }: Summary): HTMLElement {
    return changesTable(this.app, best, typeof whatIf === "string" ? time : whatIf.replayed);
  }

  private waits(pane: Pane, { waits }: Summary): HTMLElement {
    return makeTable<Wait>(
      [
        { title: "instruction", text: (w) => w.label },
        { title: "worker", text: (w) => pane.trace.workerName(w.worker), value: (w) => w.worker },
        { title: "time", text: (w) => duration(w.time), value: (w) => w.time },
        { title: "for", text: (w) => w.lastLabel, help: "the last to come of all that it waited for" },
        { title: "worker", text: (w) => pane.trace.workerName(w.lastWorker), value: (w) => w.lastWorker },
        { title: "waited", text: (w) => integer(w.count), value: (w) => w.count, help: "how many instructions waited for the same one" },
      ],
      waits,
      (w) => this.app.select(pane, w.record, true),
    );
  }

  private kinds(kinds: readonly Kind[], { bandwidth, flops: peak }: Machine): HTMLElement {
    const ofMemory = (k: Kind): number => (bandwidth === null ? 0 : (k.streamed ?? 0) / bandwidth);
    const ofCeiling = (k: Kind): number => Math.max(ofMemory(k), peak === null ? 0 : k.flops / peak);
    const columns: Column<Kind>[] = [
      { title: "kind", text: (k) => k.name, colour: (k) => css(colourOfName(k.name)) },
      { title: "time", text: (k) => duration(k.total), value: (k) => k.total, help: "of all workers, waiting included" },
      { title: "FLOP/B", text: (k) => k.flopsPerByte.toFixed(2), value: (k) => k.flopsPerByte },
      { title: "FLOP/s", text: (k) => flops(k.flops), value: (k) => k.flops },
      { title: "bytes/s", text: (k) => rate(k.bytes), value: (k) => k.bytes },
    ];
    const known = bandwidth === null ? peak !== null : kinds.every((k) => k.streamed !== null);
    if (known) {
      const help = "weights and KV over the memory's bandwidth, or FLOP/s over the rate of matrix products, whichever is more";
      columns.push({ title: "of ceiling", text: (k) => percent(ofCeiling(k)), value: ofCeiling, help });
    }
    return makeTable(columns, kinds, (k) => this.app.search(`kind:${word(k.name)}`));
  }

  private lateRanks(found: Summary): HTMLElement {
    const few = (found.lateRanks[0]?.ofRanks ?? []).length <= FEW_RANKS;
    const ranks = (found.lateRanks[0]?.ofRanks ?? []).slice(0, MAX_RANKS).map((_, rank): Column<LateRank> => {
      const part = (r: LateRank): number => (r.peerTime > 0 ? (r.ofRanks[rank] ?? 0) / r.peerTime : 0);
      const help = `of the time for a peer: while rank ${rank} came last`;
      return { title: few ? `for ${rank}` : `${rank}`, text: (r) => `${Math.round(100 * part(r))} %`, value: part, bar: part, help };
    });
    const all: Column<LateRank>[] = [
      { title: "waits", text: (r) => integer(r.of), value: (r) => r.of },
      { title: "time", text: (r) => duration(r.time), value: (r) => r.time, help: "of all workers" },
    ];
    return makeTable<LateRank>(
      [
        { title: "exchange", text: (r) => r.phase, help: "the instructions that ranks waited for" },
        { title: "last", text: (r) => `rank ${r.rank}`, value: (r) => r.rank, help: "the rank that came last most often" },
        { title: "share", text: (r) => percent(r.count / r.of), value: (r) => r.count / r.of, bar: (r) => r.count / r.of, help: "of the waits of all steps like this one" },
        ...(few ? all : []),
        { title: "for a peer", text: (r) => duration(r.peerTime), value: (r) => r.peerTime, help: "waiting for another rank than the worker's own" },
        ...ranks,
      ],
      found.lateRanks,
      (r) => this.app.search(`phase:${word(r.phase)}`),
    );
  }

  private late(pane: Pane, found: Summary): HTMLElement {
    const mean = found.busy.reduce((sum, time) => sum + time, 0) / Math.max(1, found.busy.length);
    const work = ({ worker }: LateWorker): number => (mean > 0 ? (found.busy[worker] ?? 0) / mean : 1);
    return makeTable<LateWorker>(
      [
        { title: "worker", text: (w) => pane.trace.workerName(w.worker), value: (w) => w.worker },
        { title: "waits", text: (w) => integer(w.count), value: (w) => w.count },
        { title: "share", text: (w) => percent(w.count / w.of), value: (w) => w.count, bar: (w) => w.count / w.of, help: "of all waits of the step for others" },
        { title: "work", text: (w) => `${work(w).toFixed(2)} ×`, value: work, help: "computing and loading over the mean of all workers" },
      ],
      found.lateWorkers,
      (w) => this.app.search(`worker:${pane.trace.workerName(w.worker)}`),
    );
  }

  /** A cell for every worker: how its time compares with that of the others. */
  private strips(pane: Pane, found: Summary): HTMLElement[] {
    const [computing, , barrier] = this.app.theme.states;
    if (found.busy.length === 0) return [];
    const cells = (times: readonly number[]): Cell[] =>
      times.map((time, worker) => {
        const name = pane.trace.workerName(worker);
        return { name: `worker ${name}`, time, query: `worker:${name}` };
      });
    return [
      make("h3", "", "Workers, from the first to the last"),
      ...this.strip(found, "computing and loading", cells(found.busy), computing!),
      ...this.strip(found, "waiting", cells(found.waiting), barrier!),
    ];
  }

  private strip({ time: whole }: Summary, title: string, all: readonly Cell[], colour: Rgb): HTMLElement[] {
    const times = all.map(({ time }) => time);
    const [low, high] = [Math.min(...times), Math.max(...times)];
    const cells = all.slice(0, MAX_CELLS).map(({ name, time, query }) => {
      const part = time / Math.max(1, whole);
      const cell = button("", `${name}: ${duration(time)}, ${percent(part)} of the step`, () => this.app.search(query));
      cell.style.backgroundColor = `rgb(${colour.map(Math.round).join(" ")} / ${strength(time, low, high).toFixed(3)})`;
      cell.tabIndex = -1;
      return cell;
    });
    return [
      make("p", "faint", `${title}: ${duration(low)} (faint) to ${duration(high)}`),
      make("div", "strip", ...cells),
    ];
  }

  /** The same by SM, over all steps like this one, and which SMs are busy longest. */
  private sms(pane: Pane, found: Summary): HTMLElement[] {
    const { sms } = found;
    if (sms.length === 0) return [];
    const name = ({ rank, sm }: Sm): string => pane.trace.smName(rank, sm);
    const cells = sms.map((s) => ({ name: `SM ${name(s)}`, time: s.time, query: `sm:${name(s)}` }));
    const longest = [...sms].sort((a, b) => b.time - a.time).slice(0, MAX_SMS);
    const ofMean = { text: (s: Sm) => `${s.ofMean.toFixed(2)} ×`, value: (s: Sm) => s.ofMean };
    const equal = { text: (s: Sm) => `${s.equalWork.toFixed(2)} ×`, value: (s: Sm) => s.equalWork };
    const part = (s: Sm): number => s.count / Math.max(1, s.of);
    const table = makeTable<Sm>(
      [
        { title: "SM", text: name, value: (s) => s.sm, help: "its number on the GPU; 2n and 2n + 1 are one TPC" },
        { title: "work", text: (s) => duration(s.time), value: (s) => s.time, help: "computing and loading, mean of all steps like this one" },
        { title: "of mean", ...ofMean, help: "over the mean of all SMs" },
        { title: "equal work", ...equal, help: "over what instructions of the same label, bytes and operations take on average on all SMs" },
        { title: "came last", text: (s) => percent(part(s)), value: part, bar: part, help: "of all waits for others" },
      ],
      longest,
      (s) => this.app.search(`sm:${name(s)}`),
    );
    return [
      make("h3", "", "SMs, from the first to the last"),
      ...(found.slowSms === "" ? [] : [make("p", "note", `${found.slowSms}.`)]),
      ...this.strip(found, "computing and loading", cells, this.app.theme.states[0]!),
      table,
    ];
  }
}

/**
 * How strong the colour of a time is, from 0 to 1. The least and the longest time are as far apart as colours can be, unless
 * they are nearly the same.
 */
function strength(time: number, low: number, high: number): number {
  const spread = Math.max(high - low, LEAST_SPREAD * high, 1);
  return 1 - 0.85 * Math.min(1, (high - time) / spread);
}

/** Whether two lists have the same members. */
export function isSame(a: readonly unknown[], b: readonly unknown[]): boolean {
  return a.length === b.length && a.every((member, i) => member === b[i]);
}
