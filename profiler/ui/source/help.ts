/** The list of keys and gestures. */

import { button, make } from "./dom.ts";
import { HELP } from "./query.ts";

const GROUPS: readonly (readonly [string, readonly (readonly [string, string])[]])[] = [
  [
    "Move",
    [
      ["W S", "zoom in and out, at the pointer"],
      ["A D", "pan; with Shift faster"],
      ["wheel", "scroll the workers; zoom when all of them fit, or over the tracks"],
      ["Ctrl wheel, two fingers", "zoom"],
      ["Shift wheel", "pan"],
      ["Alt wheel, + -", "height of the rows; tall rows show the roles"],
      ["drag", "pan; in the strip on top: move the window"],
      ["F", "fit the selected range or instruction"],
      ["Shift F, Home", "show everything"],
      ["G", "show the step"],
      [", .", "the step before and after"],
    ],
  ],
  [
    "Select",
    [
      ["click", "select an instruction: arrows, events, fields"],
      ["click on a layer or phase", "select its time"],
      ["drag on ruler or tracks", "select a range of time: statistics"],
      ["Shift drag on rows", "select a range of time and workers"],
      ["← →", "instruction before and after on the worker"],
      ["↑ ↓", "same time on the next worker"],
      ["[ ]", "follow the cause back, the effect forth"],
      ["C", "critical path of the step"],
      ["E", "roles of the worker; or click its number"],
      ["Shift E", "close all workers"],
      ["Esc", "clear the range, then the selection"],
    ],
  ],
  [
    "Find and show",
    [
      ["/", "search"],
      ["N, Shift N", "next and previous match"],
      ["1 to 5", "colour by phase, kind, layer, role, wait"],
      ["T", "light or dark"],
      ["I", "show or hide the panel"],
      ["O", "open a file"],
      ["?", "this list"],
    ],
  ],
];

export function makeHelp(): HTMLDialogElement {
  const dialog = make("dialog", "help");
  const columns = GROUPS.map(([title, keys]) =>
    make(
      "div",
      "",
      make("h3", "", title),
      ...keys.map(([key, what]) => make("div", "keyline", make("kbd", "", key), make("span", "", what))),
    ),
  );
  dialog.append(
    make("h2", "", "Keys and mouse"),
    make("div", "columns", ...columns),
    make("h3", "", "Search"),
    make("p", "", HELP),
    make("div", "buttons", button("Close", "", () => dialog.close())),
  );
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  return dialog;
}
