/** The selected record: what it is, when its events were, what it waited for and who waited for it. */

import type { App } from "./app.ts";
import { type Incoming, causeOver, heldUpBy, incomingOf, inputsAt, outgoingOf } from "./dependencies.ts";
import { button, make } from "./dom.ts";
import { bytes, counted, duration, flops, instant, rate, signedDuration } from "./format.ts";
import type { Pane } from "./pane.ts";
import type { Page } from "./panel.ts";
import { decode } from "./program.ts";
import { SHADES, SHADE_NAMES } from "./roles.ts";
import { loadRate, pair, segmentBar } from "./tooltip.ts";

const MAX_LINKS = 6;

export class InstructionPage implements Page {
  readonly name = "Instruction";
  readonly element = make("section", "page");
  private shown: unknown = null;

  constructor(private readonly app: App) {}

  render(): void {
    const { selected, theme } = this.app;
    const key = selected === null ? null : `${selected.pane.letter}${this.app.sideOf(selected.pane)}${selected.pane.trace.name}${selected.record}${theme.dark}`;
    if (key === this.shown && key !== null) return;
    this.shown = key;
    if (selected === null) {
      this.element.replaceChildren(
        make("p", "hint", "Click an instruction to see its events, fields and dependencies."),
        make("p", "hint", "[ follows the record that it waited for last, ] goes to what it caused; C shows the critical path of the step."),
      );
      return;
    }
    this.element.replaceChildren(...this.describe(selected.pane, selected.record));
    this.element.scrollTop = 0;
  }

  private link(pane: Pane, record: number): HTMLElement {
    const { trace } = pane;
    const name = `${trace.labelOf(record) || trace.kindOf(record)} on ${trace.workerName(trace.worker[record]!)}`;
    return button(name, "select it", () => this.app.select(pane, record, true), "link");
  }

  private describe(pane: Pane, record: number): HTMLElement[] {
    const { trace } = pane;
    const program = trace.programOf(record);
    const instruction = trace.instruction[record]!;
    const step = trace.step[record]!;
    const [begin, end] = trace.span(record);
    const split = trace.split(record);
    const loads = loadRate(trace, record);
    const busy = split[2]! + split[3]! + split[4]!;
    const work = program.flops[instruction]!;
    const parts: HTMLElement[] = [
      make("h2", "", this.app.sideOf(pane) + (trace.labelOf(record) || trace.kindOf(record))),
      make("p", "faint", program.opcode(instruction).help.split("\n")[0]!),
      pair("kind", trace.kindOf(record)),
      pair("worker, slot", `${trace.workerName(trace.worker[record]!)}, ${trace.slot[record]}`),
      ...(trace.smPlace(record) < 0 ? [] : [pair("SM", trace.smPlaceName(trace.smPlace(record)))]),
      pair("step", `${trace.stepNumber[step]}, ${counted(trace.stepTokens[step]!, "row")}`),
      pair("instruction, record", `${instruction}, ${trace.fileIndex[record]}`),
      make("h3", "", `Consumers: ${duration(end - begin)}`),
      segmentBar(this.app, trace, record),
      ...SHADES.filter((s) => split[s]! > 0).map((s) => pair(SHADE_NAMES[s], duration(split[s]!))),
      pair("bytes", bytes(trace.bytes[record]!)),
    ];
    if (loads !== null) parts.push(pair("streams", `${bytes(trace.loadBytes[record]!)} at ${rate(loads)}`));
    if (work > 0 && busy > 0) parts.push(pair("operations", flops(work / busy)));
    parts.push(...this.cause(pane, record), ...this.waits(pane, record), ...this.signals(pane, record));
    parts.push(...this.events(pane, record));
    parts.push(make("h3", "", "Fields"));
    for (const { name, value, help } of decode(program, instruction)) {
      const line = pair(name, value);
      line.title = help;
      parts.push(line);
    }
    return parts;
  }

  private cause(pane: Pane, record: number): HTMLElement[] {
    const { trace } = pane;
    const cause = trace.cause[record]!;
    const back = button("[  cause", "go to the record that came last", () => this.app.follow(-1));
    const forth = button("effect  ]", "go to what this one caused", () => this.app.follow(1));
    back.disabled = cause < 0;
    forth.disabled = pane.causes.effectsOf(record).length === 0;
    const title: HTMLElement = make("h3", "", "Last came");
    const buttons = make("div", "buttons", back, forth);
    if (cause < 0) return [title, make("p", "faint", "nothing in this trace"), buttons];
    const channel = trace.causeChannel[record]!;
    const by = heldUpBy(trace, record);
    const name = channel < 0 ? "" : trace.programOf(record).channelName(channel);
    const through = by === "queue" ? "by the order of the queue" : by === "words" ? `by words of ${name}` : `by the barrier ${name}`;
    return [
      title,
      make("p", "cause", this.link(pane, cause), ` ${through}`),
      pair("from its end to inputs", signedDuration(inputsAt(trace, record) - causeOver(trace, record))),
      buttons,
    ];
  }

  private waits(pane: Pane, record: number): HTMLElement[] {
    const waits = incomingOf(pane.trace, record);
    if (waits.length === 0) return [];
    return [make("h3", "", "Waits for"), ...waits.map((wait) => this.wait(pane, record, wait))];
  }

  private wait(pane: Pane, record: number, wait: Incoming): HTMLElement {
    const { trace } = pane;
    const what = wait.tagged ? "words of " : "barrier ";
    const writers = wait.count === 1 ? "1 writer" : `${wait.count} writers`;
    const count = wait.tagged ? writers : `${wait.target} of ${wait.count} signals`;
    const before = wait.back > 0 ? `, ${wait.back === 1 ? "the step" : `${wait.back} steps`} before` : "";
    const block = make("div", "channel", make("div", "", make("b", "", what + wait.name), ` ${count}${before}`));
    if (wait.last < 0) {
      block.append(make("div", "faint", "its producers are not in the trace"));
      return block;
    }
    const slack = inputsAt(trace, record) - wait.lastTime;
    const how = slack >= 0 ? `${duration(slack)} before the inputs were there` : `${duration(-slack)} after`;
    block.append(make("div", "", "last: ", this.link(pane, wait.last), ` ${how}`));
    return block;
  }

  private signals(pane: Pane, record: number): HTMLElement[] {
    const { trace } = pane;
    const program = trace.programOf(record);
    const barrier = program.signal(trace.instruction[record]!);
    const channels = outgoingOf(trace, record);
    if (barrier === null && channels.length === 0) return [];
    const parts: HTMLElement[] = [make("h3", "", "Signals")];
    if (barrier !== null) parts.push(pair("barrier", barrier));
    for (const { name, tagged, consumers } of channels) {
      const links = consumers.slice(0, MAX_LINKS).flatMap((c, i) => [i ? ", " : "", this.link(pane, c)]);
      const more = consumers.length > MAX_LINKS ? ` and ${consumers.length - MAX_LINKS} more` : "";
      const title = make("div", "", make("b", "", (tagged ? "words of " : "barrier ") + name), ` to ${consumers.length}`);
      parts.push(make("div", "channel", title, make("div", "", ...links, more)));
    }
    return parts;
  }

  private events(pane: Pane, record: number): HTMLElement[] {
    const { trace } = pane;
    const origin = trace.stepBegin[trace.step[record]!]!;
    const noted = trace.events
      .map((event, e) => ({ event, time: trace.times[e]![record]! }))
      .filter(({ time }) => time >= 0)
      .sort((a, b) => a.time - b.time);
    const body = make("tbody");
    noted.forEach(({ event, time }, i) => {
      const since = i ? signedDuration(time - noted[i - 1]!.time) : "";
      const line = make(
        "tr",
        "",
        make("td", "name", event.name),
        make("td", "name faint", event.role),
        make("td", "number", instant(time - origin, 1)),
        make("td", "number", since),
      );
      line.title = event.help;
      body.append(line);
    });
    const table = make("table", "numbers", body);
    return [make("h3", "", "Events since the step began"), make("div", "scroll", table)];
  }
}
