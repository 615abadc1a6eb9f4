/** What the file says about the run: machine, model, environment, steps. */

import type { App } from "./app.ts";
import { make } from "./dom.ts";
import { bytes, counted, duration, flops, integer, percent, rate, signedDuration } from "./format.ts";
import { asObject } from "./json.ts";
import type { Page } from "./panel.ts";
import { isSame } from "./summary_page.ts";
import { type Column, makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";
import type { Trace } from "./trace.ts";

const MAX_TEXT = 300;
const MAX_STEPS = 2000;
const MAX_RANKS = 64;

/** How members that are numbers with a unit are written. */
const UNITS: ReadonlyMap<string, (value: number) => string> = new Map([
  ["bandwidth", (value) => rate(value / 1e9)],
  ["flops_per_second", (value) => flops(value / 1e9)],
  ["clock_step", duration],
]);

function text(value: unknown): string {
  if (value === null) return "unknown";
  const found = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  return found.length > MAX_TEXT ? `${found.slice(0, MAX_TEXT)}…` : found;
}

/** How far the clock of a rank was from that of rank 0. */
function clock(rank: unknown, number: number): HTMLElement {
  const { clock_offset: offset, clock_uncertainty: most } = asObject(rank);
  const known = typeof offset === "number" && typeof most === "number";
  return pair(`clock of rank ${number}`, known ? `${signedDuration(offset)}, give or take ${duration(most)}` : "unknown");
}

/** A member of the header that is an object, under its name; nothing where it is empty. */
function members(title: string, value: unknown): HTMLElement[] {
  if (typeof value !== "object" || value === null) return [];
  const pairs = Object.entries(value).flatMap(([name, member]) => {
    if (name === "ranks" && Array.isArray(member)) return member.slice(0, MAX_RANKS).map(clock);
    const write = UNITS.get(name.replace(/_median$/, ""));
    return pair(name.replace(/_/g, " "), write !== undefined && typeof member === "number" ? write(member) : text(member));
  });
  return pairs.length > 0 ? [make("h3", "", title[0]!.toUpperCase() + title.slice(1)), ...pairs] : [];
}

export class TracePage implements Page {
  readonly name = "Trace";
  readonly element = make("section", "page");
  private shown: readonly Trace[] = [];

  constructor(private readonly app: App) {}

  render(): void {
    const { panes } = this.app;
    const shown = panes.map((pane) => pane.trace);
    if (isSame(shown, this.shown)) return;
    this.shown = shown;
    this.element.replaceChildren(
      ...panes.flatMap((pane) => {
        const { trace } = pane;
        const { header } = trace;
        const steps = Array.from({ length: Math.min(MAX_STEPS, trace.steps) }, (_, s) => s);
        const took = (s: number): number => trace.stepEnd[s]! - trace.stepBegin[s]!;
        const gap = (s: number): number => (s ? trace.stepBegin[s]! - trace.stepEnd[s - 1]! : 0);
        const longest = steps.reduce((most, s) => Math.max(most, took(s)), 1);
        const streamed = (s: number): number => {
          let sum = 0;
          for (let i = trace.stepOffsets[s]!; i < trace.stepOffsets[s + 1]!; i++) sum += trace.loadBytes[trace.byFile[i]!]!;
          return sum / Math.max(1, took(s));
        };
        const { bandwidth } = trace.machine;
        const { stepTokens, stepSequences, stepPromptRows } = trace;
        const whose: Column<number>[] =
          stepSequences === null || stepPromptRows === null
            ? []
            : [
                { title: "sequences", text: (s) => integer(stepSequences[s]!), value: (s) => stepSequences[s]!, help: "a request with n > 1 has several" },
                { title: "prefill", text: (s) => integer(stepPromptRows[s]!), value: (s) => stepPromptRows[s]!, help: "rows of prompt chunks" },
                {
                  title: "decode",
                  text: (s) => integer(stepTokens[s]! - stepPromptRows[s]!),
                  value: (s) => stepTokens[s]! - stepPromptRows[s]!,
                  help: "rows of sequences that have one row in the step",
                },
              ];
        return [
          make("h2", "", this.app.sideOf(pane) + trace.name),
          pair("size", bytes(trace.file.size)),
          pair("created", text(header["created"])),
          pair("megavm", text(header["megavm"])),
          pair("records", `${integer(trace.count)} in ${counted(trace.steps, "step")}`),
          pair("length", duration(trace.end)),
          make("h3", "", "Steps"),
          ...(trace.steps > MAX_STEPS ? [make("p", "faint", `The first ${integer(MAX_STEPS)} steps of ${integer(trace.steps)}.`)] : []),
          makeTable(
            [
              { title: "step", text: (s) => String(trace.stepNumber[s]), value: (s) => trace.stepNumber[s]! },
              { title: "rows", text: (s) => String(trace.stepTokens[s]), value: (s) => trace.stepTokens[s]! },
              ...whose,
              { title: "time", text: (s) => duration(took(s)), value: took, bar: (s) => took(s) / longest },
              { title: "gap before", text: (s) => duration(gap(s)), value: gap, help: "time in which no step ran" },
              {
                title: "streamed",
                text: (s) => rate(streamed(s)) + (bandwidth === null ? "" : ` · ${percent(streamed(s) / bandwidth)}`),
                value: streamed,
                help: "weights and KV; above 100 % of the memory's bandwidth, caches held a part of them, or it is that of one GPU of several",
              },
            ],
            steps,
            pane === this.app.main ? (s) => this.app.setStep(s, true) : null,
          ),
          ...["machine", "model", "environment", "notes"].flatMap((name) => members(name, header[name])),
        ];
      }),
    );
  }
}
