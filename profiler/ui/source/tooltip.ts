/** What is under the pointer: a record, or a point of a track. */

import type { App } from "./app.ts";
import { make } from "./dom.ts";
import { statesAt } from "./draw_tracks.ts";
import { heldUpBy } from "./dependencies.ts";
import { bytes, duration, instant, percent, rate } from "./format.ts";
import type { Pane } from "./pane.ts";
import { decode } from "./program.ts";
import { SHADE_NAMES, SHADES } from "./roles.ts";
import { css } from "./colour.ts";
import type { Trace } from "./trace.ts";

const MAX_FIELDS = 11;
const ABOVE = "More than the memory gives: the bytes of an instruction count evenly from its first load to its last; or caches held them.";

/** A name and a value, side by side. */
export function pair(name: string, value: string, className = ""): HTMLElement {
  return make("div", `pair ${className}`, make("span", "key", name), make("span", "value", value));
}

/** Bytes that a record streams over the time that its loads were in flight; null: it streams none. */
export function loadRate(trace: Trace, record: number): number | null {
  const loader = trace.lanes[1]!;
  const size = trace.loadBytes[record]!;
  if (size <= 0) return null;
  const { edges } = loader.used && loader.edges[0]![record]! >= 0 ? loader : trace.lanes[2]!;
  const from = edges === loader.edges ? edges[0]![record]! : edges[2]![record]!;
  const to = edges[edges.length - 1]![record]!;
  return to > from ? size / (to - from) : null;
}

/** The segments of a record's span as a bar. */
export function segmentBar(app: App, trace: Trace, record: number): HTMLElement {
  const split = trace.split(record);
  const total = split.reduce((a, b) => a + b, 0) || 1;
  const { states } = app.theme;
  const colours = [states[2], states[3], states[1], states[0], states[0]];
  return make(
    "div",
    "segments",
    ...SHADES.map((shade) => {
      const part = make("i", shade < 2 ? "hatched" : shade === 4 ? "light" : "");
      part.style.width = `${(100 * split[shade]!) / total}%`;
      part.style.backgroundColor = css(colours[shade]!);
      part.title = `${SHADE_NAMES[shade]} ${duration(split[shade]!)}`;
      return part;
    }),
  );
}

/** A layer or a phase of a step. */
function piece(side: string, pane: Pane, y: number, time: number): HTMLElement[] {
  const found = pane.pieceAt(y, time);
  if (found === null) return [make("b", "", "between two steps")];
  const { begin, end, step, name } = found;
  return [
    make("b", "", side + name),
    make("div", "faint", `step ${pane.trace.stepNumber[step]}`),
    pair("time", duration(end - begin)),
    pair("begins, since the step did", duration(begin - pane.trace.stepBegin[step]!)),
    make("div", "faint", "click: select this time"),
  ];
}

export class Tooltip {
  private readonly element = make("div", "tooltip");
  private shown: unknown = null;

  constructor(
    private readonly app: App,
    private readonly parent: HTMLElement,
  ) {
    this.element.hidden = true;
    parent.append(this.element);
    app.on(["hover", "view"], () => {
      this.update();
      this.fit();
    });
    parent.addEventListener("pointermove", (event) => this.place(event.clientX, event.clientY));
  }

  private place(x: number, y: number): void {
    const box = this.parent.getBoundingClientRect();
    [this.lastX, this.lastY] = [x - box.left, y - box.top];
    this.update();
    this.fit();
  }

  /** Beside the pointer and inside of the timeline, for what it holds now. */
  private fit(): void {
    if (this.element.hidden) return;
    const [x, y] = [this.lastX, this.lastY];
    const { clientWidth, clientHeight } = this.parent;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = x + 16 + width > clientWidth ? x - width - 12 : x + 16;
    const top = Math.min(y + 14, clientHeight - height - 6);
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  }

  private lastX = 0;
  private lastY = 0;

  private update(): void {
    const { hovered, cursor } = this.app;
    if (hovered !== null) {
      const key = hovered.record + hovered.pane.letter + this.app.panes.length;
      if (this.shown !== key) this.element.replaceChildren(...this.record(hovered.pane, hovered.record));
      this.shown = key;
      this.element.hidden = false;
      return;
    }
    const pane = this.app.panes.find((p) => this.lastY >= p.layerBand.top && this.lastY < p.body.top);
    this.shown = null;
    this.element.hidden = cursor === null || pane === undefined;
    if (pane !== undefined && cursor !== null) this.element.replaceChildren(...this.track(pane, cursor));
  }

  private track(pane: Pane, x: number): HTMLElement[] {
    const time = pane.timeAt(this.app.view, x);
    const half = this.app.view.span / pane.body.width / 2;
    if (this.lastY < pane.bandwidth.top) return piece(this.app.sideOf(pane), pane, this.lastY, time);
    const { bandwidth } = pane.activity.sample(time - half, time + half, 1);
    const limit = pane.trace.machine.bandwidth;
    const share = limit === null ? 0 : bandwidth[0]! / limit;
    const of = limit === null ? "" : `, ${percent(share)} of the ceiling`;
    return [
      make("b", "", this.app.sideOf(pane) + instant(time - pane.origin, half)),
      pair("streamed", `${rate(bandwidth[0]!)}${of}`),
      ...(share > 1 ? [make("div", "faint", ABOVE)] : []),
      ...statesAt(pane, time, half).map(({ name, workers }) => pair(name, `${workers.toFixed(1)} workers`)),
    ];
  }

  private record(pane: Pane, record: number): HTMLElement[] {
    const { trace } = pane;
    const program = trace.programOf(record);
    const instruction = trace.instruction[record]!;
    const split = trace.split(record);
    const [begin, end] = trace.span(record);
    const origin = trace.stepBegin[trace.step[record]!]!;
    const lines = [
      make("b", "", this.app.sideOf(pane) + (trace.labelOf(record) || trace.kindOf(record))),
      make(
        "div",
        "faint",
        `${trace.kindOf(record)} · worker ${trace.workerName(trace.worker[record]!)} · ` +
          `step ${trace.stepNumber[trace.step[record]!]} · slot ${trace.slot[record]}`,
      ),
      segmentBar(this.app, trace, record),
      pair("time", duration(end - begin)),
    ];
    for (const shade of SHADES) if (split[shade]! > 0) lines.push(pair(SHADE_NAMES[shade], duration(split[shade]!)));
    const loads = loadRate(trace, record);
    lines.push(pair("bytes", bytes(trace.bytes[record]!)));
    if (loads !== null) lines.push(pair("streams", `${bytes(trace.loadBytes[record]!)} at ${rate(loads)}`));
    const waits = program.waitsOf(instruction).map((row) => program.channelName(program.waits[3 * row + 1]!));
    if (waits.length > 0) lines.push(pair("waits for", waits.join(", ")));
    const cause = trace.cause[record]!;
    if (cause >= 0) {
      const through = heldUpBy(trace, record);
      lines.push(pair("last came", `${trace.labelOf(cause)} on ${trace.workerName(trace.worker[cause]!)}, by ${through}`));
    }
    const signal = program.signal(instruction);
    if (signal !== null) lines.push(pair("signals", signal));
    const events = trace.events.flatMap((event, e) => {
      const time = trace.times[e]![record]!;
      return time < 0 ? [] : [pair(event.name, instant(time - origin, 1))];
    });
    const fields = decode(program, instruction)
      .filter(({ value }) => value !== "none")
      .slice(0, MAX_FIELDS)
      .map(({ name, value }) => pair(name, value));
    lines.push(make("div", "halves", make("div", "", make("div", "faint", "since the step began"), ...events), make("div", "", ...fields)));
    return lines;
  }
}
