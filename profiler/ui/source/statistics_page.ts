/** Statistics of the selected range, the window, the step or the whole trace. */

import type { App } from "./app.ts";
import { css, colourOfName, word } from "./colour.ts";
import { make } from "./dom.ts";
import { bytes, counted, duration, flops, integer, ofCeiling, percent, rate } from "./format.ts";
import type { Page } from "./panel.ts";
import { ROLES, STATES, STATE_HELP } from "./roles.ts";
import { GROUPINGS, type GroupStatistics, type Grouping, type Scope, type Statistics } from "./statistics.ts";
import { type Balance, balance, measure, ratePerWorkers, waitingPart } from "./statistics.ts";
import { type Column, makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";
import type { Trace } from "./trace.ts";

const PLACES = ["range", "window", "step", "trace"] as const;
type Place = (typeof PLACES)[number];

export class StatisticsPage implements Page {
  readonly name = "Statistics";
  readonly element = make("section", "page");
  private readonly place = make("select");
  private readonly grouping = make("select");
  private readonly body = make("div");
  private key = "";

  constructor(private readonly app: App) {
    for (const name of PLACES) this.place.append(new Option(name === "trace" ? "whole trace" : name, name));
    for (const name of GROUPINGS) this.grouping.append(new Option(titleOf(name), name));
    this.place.value = "step";
    this.place.title = "what the numbers are of";
    this.grouping.title = "what the table has rows of";
    for (const select of [this.place, this.grouping]) select.addEventListener("change", () => this.render());
    this.element.append(make("div", "choices", "Of the ", this.place, " by ", this.grouping), this.body);
    let before = app.range;
    app.on(["range"], () => {
      if (app.range !== null && before === null) this.place.value = "range";
      if (app.range === null && this.place.value === "range") this.place.value = "step";
      before = app.range;
    });
  }

  private scope(place: Place): { scope: Scope; title: string } | null {
    const { app } = this;
    const pane = app.range?.pane ?? app.selected?.pane ?? app.main;
    if (pane === undefined) return null;
    const { trace } = pane;
    const all: [number, number] = [0, trace.workers];
    switch (place) {
      case "range": {
        if (app.range === null) return null;
        const { begin, end, workers } = app.range;
        const [first, last] = [workers[0], workers[1] - 1].map((worker) => trace.workerName(worker));
        const who = workers[0] === 0 && workers[1] === trace.workers ? "all workers" : `workers ${first} to ${last}`;
        return { scope: { begin, end, workers, step: -1 }, title: `${duration(end - begin)}, ${who}` };
      }
      case "window": {
        const begin = Math.max(0, app.view.begin + pane.origin);
        const end = Math.min(trace.end, app.view.end + pane.origin);
        return { scope: { begin, end: Math.max(end, begin + 1), workers: all, step: -1 }, title: "what the view shows" };
      }
      case "step": {
        const [begin, end] = [trace.stepBegin[pane.step]!, trace.stepEnd[pane.step]!];
        const title = `step ${trace.stepNumber[pane.step]}, ${counted(trace.stepTokens[pane.step]!, "row")}`;
        return { scope: { begin, end: Math.max(end, begin + 1), workers: all, step: pane.step }, title };
      }
      case "trace":
        return { scope: { begin: 0, end: trace.end, workers: all, step: -1 }, title: counted(trace.steps, "step") };
    }
  }

  render(): void {
    const place = this.place.value as Place;
    const found = this.scope(place);
    const pane = this.app.range?.pane ?? this.app.selected?.pane ?? this.app.main;
    if (found === null || pane === undefined) {
      this.key = "";
      this.body.replaceChildren(
        make("p", "hint", "Drag over the ruler or the tracks to select a range; with Shift also over rows of workers."),
      );
      return;
    }
    const absent = [...(pane.trace.sm === null ? ["sm"] : []), ...(pane.trace.ranks === 1 ? ["rank"] : [])];
    for (const option of this.grouping.options) option.hidden = absent.includes(option.value);
    if (absent.includes(this.grouping.value)) this.grouping.value = GROUPINGS[0]!;
    const grouping = this.grouping.value as Grouping;
    const key = JSON.stringify([found.scope, grouping, this.app.sideOf(pane), pane.trace.name, this.app.theme.dark]);
    if (key === this.key) return;
    this.key = key;
    const statistics = measure(pane.trace, found.scope, grouping);
    this.body.replaceChildren(
      make("p", "faint", this.app.sideOf(pane) + found.title),
      ...this.summary(statistics, pane.trace),
      make("h3", "", `By ${titleOf(grouping)}`),
      this.table(statistics, grouping),
      make("h3", "", "Balance: computing and loading of a worker"),
      this.balance(balance(pane.trace, found.scope)),
    );
  }

  private summary(s: Statistics, { machine, ranks }: Trace): HTMLElement[] {
    const { bandwidth, flops: peak } = machine;
    const total = s.states.reduce((a, b) => a + b, 0) || 1;
    const bar = make("div", "segments tall");
    const rows = STATES.map((name, state) => {
      const part = make("i");
      part.style.width = `${(100 * s.states[state]!) / total}%`;
      part.style.backgroundColor = css(this.app.theme.states[state]!);
      bar.append(part);
      const dot = make("i", "dot");
      dot.style.background = css(this.app.theme.states[state]!);
      const share = percent(s.states[state]! / total);
      const line = make(
        "div",
        "pair",
        make("span", "key", dot, name),
        make("span", "value", `${duration(s.states[state]! / s.workers)} · ${share}`),
      );
      line.title = STATE_HELP[state]!;
      return line;
    });
    const streamed = s.streamed / s.busy;
    const of = bandwidth === null ? "" : ` · ${ofCeiling(streamed / bandwidth, machine.name, ranks)}`;
    const operations = s.flops / s.busy;
    const ofPeak = peak === null ? "" : ` · ${percent(operations / peak)} of ceiling`;
    return [
      pair("duration", duration(s.duration) + (s.busy < s.duration ? ` · a step ran for ${duration(s.busy)}` : "")),
      pair("instructions", integer(s.count)),
      pair("streamed", `${bytes(s.streamed)} · ${rate(streamed)}${of}`),
      pair("read and written", `${bytes(s.bytes)} · ${rate(s.bytes / s.busy)}`),
      pair("operations", flops(operations) + ofPeak),
      make("h3", "", "What a worker does while a step runs"),
      bar,
      ...rows,
      make("h3", "", "How long a worker's roles have an instruction"),
      ...ROLES.map((role, i) => pair(role, `${duration(s.roles[i]! / s.workers)} · ${percent(s.roles[i]! / s.workers / s.busy)}`)),
    ];
  }

  private balance(rows: readonly Balance[]): HTMLElement {
    const imbalance = (b: Balance): number => (b.mean > 0 ? b.most / b.mean : 1);
    const columns: Column<Balance>[] = [
      { title: "phase", text: (b) => b.name, colour: (b) => css(colourOfName(b.name)) },
      { title: "workers", text: (b) => b.workers.toFixed(1), value: (b) => b.workers, help: "that take part" },
      { title: "least", text: (b) => duration(b.least), value: (b) => b.least, help: "means over layers and steps" },
      { title: "mean", text: (b) => duration(b.mean), value: (b) => b.mean },
      { title: "most", text: (b) => duration(b.most), value: (b) => b.most },
      { title: "most / mean", text: (b) => imbalance(b).toFixed(2), value: imbalance, help: "1 is even" },
    ];
    return makeTable(columns, rows, (b) => this.app.search(queryOf("phase", b.name)));
  }

  private table(s: Statistics, grouping: Grouping): HTMLElement {
    const most = Math.max(1, ...s.groups.map((g) => g.total));
    const columns: Column<GroupStatistics>[] = [
      {
        title: titleOf(grouping),
        text: (g) => g.name,
        colour: (g) => (grouping === "phase" || grouping === "kind" ? css(colourOfName(g.name)) : null),
      },
      { title: "n", text: (g) => integer(g.count), value: (g) => g.count },
      { title: "p50", text: (g) => duration(g.p50), value: (g) => g.p50, help: "median time of one instruction, waiting included" },
      { title: "p99", text: (g) => duration(g.p99), value: (g) => g.p99 },
      {
        title: "total",
        text: (g) => duration(g.total),
        value: (g) => g.total,
        bar: (g) => g.total / most,
        help: "of all workers together",
      },
      { title: "wait", text: (g) => percent(waitingPart(g)), value: waitingPart, help: "part of the time that is waiting" },
      {
        title: "bytes",
        text: (g) => bytes(g.bytes),
        value: (g) => g.bytes,
        help: "that its instructions read and write; loads of later instructions are not among them",
      },
      {
        title: "rate",
        text: (g) => (g.bytes > 0 ? rate(ratePerWorkers(g, g.bytes, s.workers)) : "-"),
        value: (g) => ratePerWorkers(g, g.bytes, s.workers) || 0,
        help: "bytes over the time of loading and computing: what all workers would reach that did nothing else (more than the memory gives where loads came while they waited)",
      },
    ];
    return makeTable(columns, s.groups, (g) => this.app.search(queryOf(grouping, g.name)));
  }
}

function titleOf(grouping: Grouping): string {
  return grouping === "sm" ? "SM" : grouping;
}

function queryOf(grouping: Grouping, name: string): string {
  if (name === "SM unknown") return "sm:none";
  if (grouping === "rank" && name === "unknown") return "rank:none";
  const numbered = ["layer", "worker", "sm", "rank"].includes(grouping);
  return `${grouping}:${numbered ? name.replace(/^\w+ /, "") : word(name)}`;
}
