/** Elements made in code. Text from files only ever becomes text. */

type Child = Node | string | null | undefined | false;

/** An element with a class, children and properties. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className = "",
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const child of children) if (child) element.append(child);
  return element;
}

/** A button that does something. */
export function button(label: string, title: string, action: () => void, className = ""): HTMLButtonElement {
  const element = make("button", className, label);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", action);
  return element;
}

/** The element of the page with an id. */
export function byId<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element ${id}`);
  return found as T;
}
