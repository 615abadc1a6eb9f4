/** Two traces side by side: which steps are aligned, and what changed from one to the other. */

import type { App } from "./app.ts";
import { colourOfName, css, word } from "./colour.ts";
import { button, make } from "./dom.ts";
import { duration, percent, signedDuration } from "./format.ts";
import type { Pane } from "./pane.ts";
import type { Page } from "./panel.ts";
import { type PhaseSum, sumsOf } from "./path_page.ts";
import { type Delta, type Grouping, compare, measure } from "./statistics.ts";
import { type Column, makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";

const GROUPINGS: readonly Grouping[] = ["phase", "kind", "label"];

export class ComparePage implements Page {
  readonly name = "Compare";
  readonly element = make("section", "page");
  private readonly grouping = make("select");
  private key = "";

  constructor(
    private readonly app: App,
    private readonly openCompare: () => void,
  ) {
    for (const name of GROUPINGS) this.grouping.append(new Option(name, name));
    this.grouping.addEventListener("change", () => this.render());
  }

  render(): void {
    const [a, b] = this.app.panes;
    if (a === undefined || b === undefined) {
      this.key = "";
      this.element.replaceChildren(
        make("p", "hint", "Open a second trace below the first one. Both are aligned at the begin of a step and zoom together."),
        make("div", "buttons", button("Compare with a file ...", "", this.openCompare)),
        make("p", "hint", "A file that is dropped on the lower half of the timeline is compared, too."),
      );
      return;
    }
    const grouping = this.grouping.value as Grouping;
    const key = JSON.stringify([a.step, b.step, grouping, a.trace.name, b.trace.name, this.app.theme.dark]);
    if (key === this.key) return;
    this.key = key;
    const [first, second] = [a, b].map(({ trace, step }) =>
      measure(
        trace,
        { begin: trace.stepBegin[step]!, end: trace.stepEnd[step]!, workers: [0, trace.workers], step },
        grouping,
      ),
    );
    const [timeA, timeB] = [a, b].map(({ trace, step }) => trace.stepEnd[step]! - trace.stepBegin[step]!) as [number, number];
    this.element.replaceChildren(
      make("p", "", make("b", "", "A "), a.trace.name, ", step ", this.stepChoice(a)),
      make("p", "", make("b", "", "B "), b.trace.name, ", step ", this.stepChoice(b)),
      ...differences(a, b).map((text) => make("p", "note", text)),
      pair("step A", duration(timeA)),
      pair("step B", duration(timeB)),
      pair("B − A", `${signedDuration(timeB - timeA)}, ${signed(timeB / timeA - 1)}`, timeB > timeA ? "worse" : timeB < timeA ? "better" : ""),
      make("div", "choices", "Time of all workers in the step by ", this.grouping),
      this.table(compare(first!.groups, second!.groups), grouping),
      make("h3", "", "Critical path by phase"),
      this.paths(a, b),
      make("div", "buttons", button("Close B", "show the first trace alone", () => this.app.closeCompare())),
    );
  }

  private stepChoice(pane: Pane): HTMLElement {
    const select = make("select");
    pane.trace.stepNumber.forEach((number, s) => select.append(new Option(String(number), String(s))));
    select.value = String(pane.step);
    select.title = "the step that is aligned";
    select.addEventListener("change", () => this.app.alignStep(pane, Number(select.value)));
    return select;
  }

  private paths(a: Pane, b: Pane): HTMLElement {
    const [inA, inB] = [a, b].map(
      ({ trace, causes, step }) => new Map(sumsOf(trace, causes.path(step)).map((sum) => [sum.name, sum])),
    ) as [Map<string, PhaseSum>, Map<string, PhaseSum>];
    const rows = [...new Set([...inA.keys(), ...inB.keys()])]
      .map((name) => ({ name, a: inA.get(name)?.total ?? 0, b: inB.get(name)?.total ?? 0 }))
      .sort((x, y) => Math.abs(y.b - y.a) - Math.abs(x.b - x.a));
    type Row = (typeof rows)[number];
    return makeTable<Row>(
      [
        { title: "phase", text: (r) => r.name, colour: (r) => css(colourOfName(r.name)) },
        { title: "A", text: (r) => (inA.has(r.name) ? duration(r.a) : "-"), value: (r) => r.a },
        { title: "B", text: (r) => (inB.has(r.name) ? duration(r.b) : "-"), value: (r) => r.b },
        {
          title: "B − A",
          text: (r) => signedDuration(r.b - r.a),
          value: (r) => r.b - r.a,
          className: (r) => (r.b > r.a ? "worse" : r.b < r.a ? "better" : ""),
        },
      ],
      rows,
      (r) => this.app.search(`phase:${word(r.name)}`),
    );
  }

  private table(deltas: readonly Delta[], grouping: Grouping): HTMLElement {
    const waits = (d: Delta): number => wait(d.b) - wait(d.a);
    const columns: Column<Delta>[] = [
      {
        title: grouping,
        text: (d) => d.name,
        colour: (d) => (grouping === "label" ? null : css(colourOfName(d.name))),
      },
      { title: "A", text: (d) => (d.a ? duration(d.a.total) : "-"), value: (d) => d.a?.total ?? 0 },
      { title: "B", text: (d) => (d.b ? duration(d.b.total) : "-"), value: (d) => d.b?.total ?? 0 },
      {
        title: "B − A",
        text: (d) => signedDuration(d.change),
        value: (d) => d.change,
        className: (d) => (d.change > 0 ? "worse" : d.change < 0 ? "better" : ""),
      },
      {
        title: "change",
        text: (d) => (d.a && d.b && d.a.total > 0 ? signed(d.b.total / d.a.total - 1) : "-"),
        value: (d) => (d.a && d.b && d.a.total > 0 ? d.b.total / d.a.total - 1 : 0),
      },
      { title: "waiting", text: (d) => signedDuration(waits(d)), value: waits, help: "change of the time that is waiting" },
      {
        title: "p50",
        help: "change of the median time of one instruction",
        text: (d) => (d.a && d.b ? signedDuration(d.b.p50 - d.a.p50) : "-"),
        value: (d) => (d.b?.p50 ?? 0) - (d.a?.p50 ?? 0),
      },
    ];
    return makeTable(columns, deltas, (d) => this.app.search(`${grouping}:${word(d.name)}`));
  }
}

/** What else is different, so that a comparison of times says less. */
function differences(a: Pane, b: Pane): string[] {
  const found: string[] = [];
  const note = (what: string, inA: unknown, inB: unknown): void => {
    if (inA !== inB) found.push(`${what}: ${String(inA).slice(0, 80)} in A, ${String(inB).slice(0, 80)} in B.`);
  };
  note("The models are different", a.trace.model || "unknown", b.trace.model || "unknown");
  note("The devices are different", a.trace.machine.device, b.trace.machine.device);
  note("The numbers of ranks are different", a.trace.ranks, b.trace.ranks);
  note("The numbers of workers are different", a.trace.workers, b.trace.workers);
  note("The steps have different numbers of rows", a.trace.stepTokens[a.step], b.trace.stepTokens[b.step]);
  return found;
}

function wait(group: Delta["a"]): number {
  return group === null ? 0 : group.segments[0]! + group.segments[1]!;
}

function signed(part: number): string {
  return `${part > 0 ? "+" : ""}${percent(part)}`.replace("-", "\u2212");
}
