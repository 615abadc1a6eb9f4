/** What a step would take with single things changed, as a table that leads into the timeline. */

import type { App } from "./app.ts";
import { word } from "./colour.ts";
import { duration, percent } from "./format.ts";
import { type Change, shortName } from "./summary.ts";
import { makeTable } from "./table.ts";

/** `replayed`: how long the step takes with nothing changed. */
export function changesTable(app: App, changes: readonly Change[], replayed: number): HTMLElement {
  const most = Math.max(1, changes[0]?.saved ?? 1);
  return makeTable<Change>(
    [
      { title: "change", text: (c) => c.text, className: () => "wrap" },
      { title: "step", text: (c) => duration(c.time) + (c.memoryBound ? "*" : ""), value: (c) => c.time, help: "how long it would take" },
      { title: "saved", text: (c) => duration(c.saved), value: (c) => c.saved, bar: (c) => c.saved / most },
      { title: "share", text: (c) => percent(c.saved / Math.max(1, replayed)), value: (c) => c.saved },
    ],
    changes,
    ({ what, of }) => {
      const query = queryFor(what, of);
      if (query !== null) app.search(query);
    },
  );
}

/** What the timeline is searched for, for something that a change is of. */
function queryFor(what: string, of: string): string | null {
  if (of === "") return null;
  if (what === "worker") return `worker:${of}`;
  return `phase:${word(shortName(of.replace(/ (?:words|barrier)$/, "")))}`;
}
