/** A table that sorts by the column that is clicked. */

import { make } from "./dom.ts";

export interface Column<T> {
  readonly title: string;
  readonly help?: string;
  readonly text: (row: T) => string;
  /** What to sort by; the text otherwise. */
  readonly value?: (row: T) => number;
  readonly colour?: (row: T) => string | null;
  /** A bar behind the text, from 0 to 1. */
  readonly bar?: (row: T) => number;
  readonly className?: (row: T) => string;
}

export function makeTable<T>(
  columns: readonly Column<T>[],
  rows: readonly T[],
  choose: ((row: T) => void) | null,
): HTMLElement {
  const head = make("tr");
  const body = make("tbody");
  const table = make("table", "numbers", make("thead", "", head), body);
  let sorted = -1;
  let falling = true;

  const render = (): void => {
    const column = columns[sorted];
    const order = [...rows];
    if (column !== undefined) {
      const { value, text } = column;
      order.sort((a, b) => (value ? value(a) - value(b) : text(a).localeCompare(text(b), "en", { numeric: true })));
      if (falling) order.reverse();
    }
    body.replaceChildren(
      ...order.map((row) => {
        const line = make("tr");
        for (const { text, value, colour, bar, className } of columns) {
          const cell = make("td", `${value ? "number" : "name"} ${className?.(row) ?? ""}`);
          const dot = colour?.(row);
          if (dot) {
            const mark = make("i", "dot");
            mark.style.background = dot;
            cell.append(mark);
          }
          cell.append(text(row));
          if (!value) cell.title = text(row);
          if (bar) {
            cell.classList.add("bar");
            cell.style.setProperty("--part", `${Math.max(0, Math.min(100, 100 * bar(row)))}%`);
          }
          line.append(cell);
        }
        if (choose !== null) {
          line.className = "choice";
          line.tabIndex = 0;
          line.addEventListener("click", () => choose(row));
          line.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" && event.key !== " ") return;
            event.preventDefault();
            event.stopPropagation();
            choose(row);
          });
        }
        return line;
      }),
    );
    head.querySelectorAll("th").forEach((cell, i) => {
      cell.setAttribute("aria-sort", i !== sorted ? "none" : falling ? "descending" : "ascending");
    });
  };

  columns.forEach(({ title, help, value }, index) => {
    const sort = make("button", "", title);
    sort.type = "button";
    const cell = make("th", value ? "number" : "name", sort);
    cell.scope = "col";
    if (help) cell.title = help;
    cell.addEventListener("click", () => {
      falling = sorted === index ? !falling : value !== undefined;
      sorted = index;
      render();
    });
    head.append(cell);
  });
  render();
  return make("div", "scroll", table);
}
