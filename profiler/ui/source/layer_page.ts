/** The mean layer: how long each phase of it takes, from the tenth to the ninetieth percentile of layers. */

import type { App } from "./app.ts";
import { colourOfName, css } from "./colour.ts";
import { make } from "./dom.ts";
import { type Folded, type FoldedPhase, fold } from "./folded.ts";
import { counted, duration, percent, signedDuration } from "./format.ts";
import type { Page } from "./panel.ts";
import type { Pane } from "./pane.ts";
import { makeTable } from "./table.ts";
import { pair } from "./tooltip.ts";

export class LayerPage implements Page {
  readonly name = "Layer";
  readonly element = make("section", "page");
  private shown: readonly unknown[] = [];

  constructor(private readonly app: App) {}

  render(): void {
    const pane = this.app.selected?.pane ?? this.app.main;
    if (pane === undefined) return;
    const { trace, step } = pane;
    const side = this.app.sideOf(pane);
    const state = [trace, step, this.app.theme, side];
    if (state.every((value, i) => value === this.shown[i])) return;
    this.shown = state;
    const folded = fold(trace, pane.phases, step);
    if (folded === null) {
      const help = "Nothing in this program repeats. Labels such as layers.3.down_proj or blocks.3.mlp name what does.";
      this.element.replaceChildren(make("h2", "", "No layers"), make("p", "", help));
      return;
    }
    const { mean, p10, p90 } = folded.length;
    this.element.replaceChildren(
      make("h2", "", side ? `${side}the mean layer` : "The mean layer"),
      make(
        "p",
        "faint",
        `${counted(folded.count, "layer")} of ${counted(folded.steps, "step")} with ` +
          `${counted(trace.stepTokens[step]!, "row")}, one upon the other. A phase begins when half of its instructions have ` +
          "their inputs and ends where the next one begins.",
      ),
      pair("time of a layer", `${duration(mean)} (p10 ${duration(p10)}, p90 ${duration(p90)})`),
      this.picture(folded),
      this.phases(folded),
      make("h3", "", "Layer by layer (click: select it in the step)"),
      this.layers(folded, pane),
    );
  }

  /** A bar per phase, from the mean begin to the mean end, with a line from p10 to p90 of its end. */
  private picture({ phases }: Folded): HTMLElement {
    const whole = Math.max(...phases.map(({ begin, length }) => begin + Math.max(length.mean, length.p90))) || 1;
    const at = (time: number): string => `${(100 * time) / whole}%`;
    return make(
      "div",
      "folded",
      ...phases.map(({ name, begin, length }) => {
        const bar = make("i", "bar");
        bar.style.left = at(begin);
        bar.style.width = at(length.mean);
        bar.style.background = css(colourOfName(name));
        const range = make("i", "range");
        range.style.left = at(begin + length.p10);
        range.style.width = at(length.p90 - length.p10);
        const line = make("div", "line", make("span", "label", name), make("span", "track", bar, range));
        line.title = `${name}: ${duration(length.mean)}, p10 ${duration(length.p10)}, p90 ${duration(length.p90)}`;
        return line;
      }),
    );
  }

  private phases({ phases, length }: Folded): HTMLElement {
    const time = (of: (p: FoldedPhase) => number): { text: (p: FoldedPhase) => string; value: typeof of } => ({
      text: (p) => duration(of(p)),
      value: of,
    });
    return makeTable<FoldedPhase>(
      [
        { title: "phase", text: (p) => p.name, colour: (p) => css(colourOfName(p.name)) },
        { title: "begins", help: "since the layer began, mean", ...time((p) => p.begin) },
        { title: "mean", ...time((p) => p.length.mean), bar: (p) => p.length.mean / length.mean },
        { title: "p10", help: "a tenth of the layers take less", ...time((p) => p.length.p10) },
        { title: "p90", help: "a tenth of the layers take more", ...time((p) => p.length.p90) },
        { title: "share", text: (p) => percent(p.length.mean / length.mean), value: (p) => p.length.mean },
      ],
      phases,
      null,
    );
  }

  private layers({ layers, length }: Folded, pane: Pane): HTMLElement {
    const longest = Math.max(...layers.map((layer) => layer.length.mean));
    return makeTable(
      [
        { title: "layer", text: (l) => l.name },
        { title: "mean", text: (l) => duration(l.length.mean), value: (l) => l.length.mean, bar: (l) => l.length.mean / longest },
        { title: "from the mean", text: (l) => signedDuration(l.length.mean - length.mean), value: (l) => l.length.mean },
      ],
      layers,
      ({ name }) => {
        const piece = pane.phases.layers.find((p) => p.step === pane.step && p.name === name);
        if (piece === undefined || piece.end <= piece.begin) return;
        this.app.setRange({ pane, begin: piece.begin, end: piece.end, workers: [0, pane.trace.workers] });
        this.app.focus();
      },
    );
  }
}
