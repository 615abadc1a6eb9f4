/** The critical path of the step: what it consists of, in sum and link by link. */

import type { App } from "./app.ts";
import { colourOfName, css } from "./colour.ts";
import { type Link, PARTS, PART_HELP, heldUpBy } from "./dependencies.ts";
import { button, make } from "./dom.ts";
import { duration, integer, percent } from "./format.ts";
import type { Page } from "./panel.ts";
import { makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";
import type { Trace } from "./trace.ts";

export interface PhaseSum {
  readonly name: string;
  count: number;
  total: number;
  readonly parts: number[];
}

/** What of a path each phase has, most first. */
export function sumsOf(trace: Trace, path: readonly Link[]): PhaseSum[] {
  const sums = new Map<number, PhaseSum>();
  for (const { record, begin, end, parts } of path) {
    const phase = trace.phase[record]!;
    let sum = sums.get(phase);
    if (sum === undefined) {
      sums.set(phase, (sum = { name: trace.phases[phase]!, count: 0, total: 0, parts: PARTS.map(() => 0) }));
    }
    sum.count++;
    sum.total += end - begin;
    parts.forEach((part, i) => (sum.parts[i]! += part));
  }
  return [...sums.values()].sort((a, b) => b.total - a.total);
}

export class PathPage implements Page {
  readonly name = "Critical path";
  readonly element = make("section", "page");
  private key = "";

  constructor(private readonly app: App) {}

  render(): void {
    const pane = this.app.selected?.pane ?? this.app.main;
    if (pane === undefined) return;
    const { trace, step } = pane;
    const side = this.app.sideOf(pane);
    const key = `${pane.letter}${side}${trace.name}${step}${this.app.critical}${this.app.theme.dark}`;
    if (key === this.key) return;
    this.key = key;
    const path = pane.causes.path(step);
    const length = path.reduce((sum, link) => sum + link.end - link.begin, 0);
    const whole = trace.stepEnd[step]! - trace.stepBegin[step]!;
    const toggle = button(
      this.app.critical ? "Hide in the timeline (C)" : "Show in the timeline (C)",
      "",
      () => this.app.setCritical(!this.app.critical),
    );
    this.element.replaceChildren(
      make("h2", "", `${side}${side ? "step" : "Step"} ${trace.stepNumber[step]}`),
      make("p", "faint", "The chain of records that made the step as long as it was: each began to compute when the one before it was over."),
      pair("step", duration(whole)),
      pair("path", `${duration(length)} · ${percent(length / whole)} of the step`),
      pair("records", integer(path.length)),
      make("div", "buttons", toggle),
      ...this.parts(path, length),
      make("h3", "", "By phase"),
      this.phases(trace, path, length),
      make("h3", "", "Link by link"),
      this.links(trace, path),
    );
  }

  private parts(path: readonly Link[], length: number): HTMLElement[] {
    return PARTS.map((name, i) => {
      const sum = path.reduce((total, link) => total + link.parts[i]!, 0);
      const line = pair(name, `${duration(sum)} · ${percent(sum / length)}`);
      line.title = PART_HELP[i]!;
      return line;
    });
  }

  private phases(trace: Trace, path: readonly Link[], length: number): HTMLElement {
    const rows = sumsOf(trace, path);
    const part = (index: number, title: string) => ({
      title,
      help: PART_HELP[index]!,
      text: (s: PhaseSum) => duration(s.parts[index]!),
      value: (s: PhaseSum) => s.parts[index]!,
    });
    return makeTable<PhaseSum>(
      [
        { title: "phase", text: (s) => s.name, colour: (s) => css(colourOfName(s.name)) },
        { title: "n", text: (s) => integer(s.count), value: (s) => s.count },
        {
          title: "time",
          text: (s) => duration(s.total),
          value: (s) => s.total,
          bar: (s) => s.total / (rows[0]?.total || 1),
        },
        { title: "share", text: (s) => percent(s.total / length), value: (s) => s.total },
        part(0, "delay"),
        part(1, "latency"),
        part(2, "load"),
        part(3, "compute"),
        part(4, "signal"),
      ],
      rows,
      null,
    );
  }

  private links(trace: Trace, path: readonly Link[]): HTMLElement {
    const pane = this.app.selected?.pane ?? this.app.main!;
    return makeTable<Link>(
      [
        { title: "record", text: (l) => trace.labelOf(l.record) || trace.kindOf(l.record) },
        { title: "worker", text: (l) => trace.workerName(trace.worker[l.record]!), value: (l) => trace.worker[l.record]! },
        { title: "after", text: (l) => heldUpBy(trace, l.record), help: "how the record before it held it up" },
        { title: "time", text: (l) => duration(l.end - l.begin), value: (l) => l.end - l.begin },
        { title: "latency", text: (l) => duration(l.parts[1]!), value: (l) => l.parts[1]!, help: PART_HELP[1] },
        { title: "load", text: (l) => duration(l.parts[2]!), value: (l) => l.parts[2]!, help: PART_HELP[2] },
        { title: "compute", text: (l) => duration(l.parts[3]!), value: (l) => l.parts[3]!, help: PART_HELP[3] },
      ],
      path,
      (l) => this.app.select(pane, l.record, true),
    );
  }
}
