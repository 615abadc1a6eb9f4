/** Pointer, wheel and keys on the timeline. */

import type { App } from "./app.ts";
import { MODES } from "./colour.ts";
import type { Pane } from "./pane.ts";

const CLICK_DISTANCE = 4;

/** Two fingers: the times below them when they came down, and where they are. */
interface Pinch {
  readonly fingers: Map<number, number>;
  pane: Pane | null;
  begin: number;
  scale: number;
}

type Drag =
  | { kind: "pan"; pane: Pane; x: number; y: number; begin: number; end: number; scroll: number }
  | { kind: "range"; pane: Pane; time: number; worker: number; area: boolean }
  | { kind: "overview" };

export interface Commands {
  help(): void;
  focusSearch(): void;
  togglePanel(): void;
  toggleTheme(): void;
  openFile(beside: boolean): void;
}

export function listen(app: App, commands: Commands): void {
  const { overlay } = app.stage;
  let drag: Drag | null = null;
  let pointer: { x: number; y: number } | null = null;
  let start = { x: 0, y: 0 };
  let moved = false;

  const at = (event: MouseEvent): { x: number; y: number } => {
    const box = overlay.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const paneAt = (y: number): Pane | undefined => app.panes.find((pane) => pane.contains(y)) ?? app.main;

  const moveOverview = (x: number): void => {
    const { left, width } = app.stage.overviewBox;
    const [low, high] = app.view.limits;
    const time = low + Math.max(0, Math.min(1, (x - left) / width)) * (high - low);
    app.motion.stop();
    app.view.show(time - app.view.span / 2, time + app.view.span / 2);
    app.changed("view");
  };

  // Two fingers keep the times below them: they zoom and pan at once.
  const pinch: Pinch = { fingers: new Map(), pane: null, begin: 0, scale: 0 };
  const ends = (): [number, number] => {
    const [a, b] = [...pinch.fingers.values()] as [number, number];
    return a < b ? [a, b] : [b, a];
  };
  const beginPinch = (pane: Pane): void => {
    const [left, right] = ends();
    const [from, to] = [pane.timeAt(app.view, left) - pane.origin, pane.timeAt(app.view, right) - pane.origin];
    Object.assign(pinch, { pane, begin: from, scale: Math.max(1e-9, to - from) });
    drag = null;
    moved = true;
    app.hover(null, -1, null);
  };
  const movePinch = (pane: Pane): void => {
    const [left, right] = ends();
    const perPixel = pinch.scale / Math.max(8, right - left);
    const begin = pinch.begin - (left - pane.body.left) * perPixel;
    app.motion.stop();
    app.view.show(begin, begin + pane.body.width * perPixel);
    app.changed("view");
  };

  overlay.addEventListener("pointerdown", (event) => {
    const { x, y } = (start = at(event));
    const pane = paneAt(y);
    if (event.pointerType === "touch") pinch.fingers.set(event.pointerId, x);
    if (pinch.fingers.size === 2 && pane !== undefined) {
      overlay.setPointerCapture(event.pointerId);
      beginPinch(pane);
    }
    if (pinch.fingers.size > 1) return;
    if (event.button !== 0 || pane === undefined) return;
    overlay.focus({ preventScroll: true });
    overlay.setPointerCapture(event.pointerId);
    moved = false;
    const { overviewBox, rulerBox } = app.stage;
    if (y < rulerBox.top) {
      drag = { kind: "overview" };
      if (x >= overviewBox.left) moveOverview(x);
    } else if (y < pane.body.top || event.shiftKey) {
      const area = y >= pane.body.top;
      drag = { kind: "range", pane, time: pane.timeAt(app.view, x), worker: pane.workerAt(y), area };
    } else {
      const { begin, end } = app.view;
      drag = { kind: "pan", pane, x, y, begin, end, scroll: pane.scroll };
    }
  });

  const recordAt = (pane: Pane, x: number, y: number): number =>
    pane.contains(y) ? pane.recordAt(app.view, x, y) : -1;
  // Keys and glides move the picture below a pointer that rests.
  app.on(["view"], () => {
    const pane = pointer === null || drag !== null ? undefined : paneAt(pointer.y);
    if (pane === undefined) return;
    const { x, y } = pointer!;
    const record = recordAt(pane, x, y);
    if (record !== (app.hovered?.record ?? -1)) app.hover(pane, record, x >= pane.body.left ? x : null);
  });

  overlay.addEventListener("pointermove", (event) => {
    const { x, y } = (pointer = at(event));
    if (pinch.fingers.has(event.pointerId)) pinch.fingers.set(event.pointerId, x);
    if (pinch.pane !== null) {
      if (pinch.fingers.size === 2) movePinch(pinch.pane);
      return;
    }
    if (Math.hypot(x - start.x, y - start.y) > CLICK_DISTANCE) moved = true;
    const pane = paneAt(y);
    if (pane === undefined) return;
    app.motion.anchor = pane.timeAt(app.view, x) - pane.origin;
    if (drag === null || !moved) {
      const inside = x >= pane.body.left;
      app.hover(pane, recordAt(pane, x, y), inside ? x : null);
      overlay.style.cursor =
        y < pane.body.top && inside ? "col-resize" : x < pane.body.left && pane.contains(y) ? "pointer" : "default";
      return;
    }
    if (drag.kind === "overview") moveOverview(x);
    else if (drag.kind === "pan") {
      const shift = ((drag.x - x) / drag.pane.body.width) * (drag.end - drag.begin);
      app.motion.stop();
      app.view.show(drag.begin + shift, drag.end + shift);
      drag.pane.scrollTo(drag.scroll + drag.y - y);
      overlay.style.cursor = "grabbing";
      app.hover(null, -1, null);
      app.changed("view");
    } else {
      const { trace, body } = drag.pane;
      const time = drag.pane.timeAt(app.view, Math.max(body.left, Math.min(body.left + body.width, x)));
      const worker = drag.pane.workerAt(y);
      const workers: [number, number] = drag.area
        ? [Math.min(worker, drag.worker), Math.max(worker, drag.worker) + 1]
        : [0, trace.workers];
      const [begin, end] = [Math.max(0, Math.min(time, drag.time)), Math.min(trace.end, Math.max(time, drag.time))];
      if (end > begin) app.setRange({ pane: drag.pane, begin, end, workers });
      app.hover(null, -1, x);
    }
  });

  const finish = (event: PointerEvent): void => {
    const { x, y } = at(event);
    pinch.fingers.delete(event.pointerId);
    if (pinch.fingers.size === 0) pinch.pane = null;
    const ended = drag;
    drag = null;
    overlay.style.cursor = "default";
    if (ended === null || moved || event.type === "pointercancel") return;
    if (ended.kind === "range" && !ended.area) {
      const { pane } = ended;
      const piece = pane.pieceAt(y, pane.timeAt(app.view, x));
      app.setRange(piece === null ? null : { pane, begin: piece.begin, end: piece.end, workers: [0, pane.trace.workers] });
    } else if (ended.kind !== "overview") {
      const { pane } = ended;
      if (x < pane.body.left && pane.contains(y)) {
        app.toggleWorker(pane, pane.workerAt(y));
        return;
      }
      const record = pane.recordAt(app.view, x, y);
      if (record >= 0) app.select(pane, record, false);
      else app.clear();
    }
  };
  overlay.addEventListener("pointerup", finish);
  overlay.addEventListener("pointercancel", finish);
  overlay.addEventListener("pointerleave", () => {
    if (drag === null) app.hover(null, -1, null);
    app.motion.anchor = null;
    pointer = null;
  });
  overlay.addEventListener("dblclick", (event) => {
    const { x, y } = at(event);
    const pane = paneAt(y);
    if (pane === undefined || x < pane.body.left) return;
    if (pane.recordAt(app.view, x, y) >= 0) app.focus();
    else if (y < app.stage.rulerBox.top) app.showAll();
  });

  overlay.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const { x, y } = at(event);
      const pane = paneAt(y);
      if (pane === undefined) return;
      const unit = event.deltaMode === 1 ? 20 : event.deltaMode === 2 ? 400 : 1;
      const dx = (event.shiftKey && event.deltaX === 0 ? event.deltaY : event.deltaX) * unit;
      const dy = event.shiftKey ? 0 : event.deltaY * unit;
      app.motion.stop();
      if (event.altKey) {
        pane.scaleRows(Math.exp(-dy * 0.002), y);
      } else if (event.ctrlKey || event.metaKey || (dy !== 0 && (pane.maxScroll < 1 || y < pane.body.top))) {
        // A pinch on a touch pad arrives as ctrl and small steps.
        const speed = event.ctrlKey && Math.abs(dy) < 25 ? 0.012 : 0.0022;
        app.view.zoom(pane.timeAt(app.view, x) - pane.origin, Math.exp(dy * speed));
      } else if (dy !== 0) {
        pane.scrollTo(pane.scroll + dy);
      }
      if (dx !== 0) app.view.pan((dx / pane.body.width) * app.view.span);
      app.hover(pane, pane.recordAt(app.view, x, y), x >= pane.body.left ? x : null);
      app.changed("view");
    },
    { passive: false },
  );

  listenToKeys(app, commands);
}

function listenToKeys(app: App, commands: Commands): void {
  const typing = (event: Event): boolean => {
    const { target } = event;
    return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
  };
  const scaleRows = (factor: number): void => {
    for (const pane of app.panes) pane.scaleRows(factor, pane.body.top + pane.body.height / 2);
    app.changed("view");
  };
  const toggleOpen = (): void => {
    const chosen = app.selected ?? app.hovered;
    if (chosen !== null) app.toggleWorker(chosen.pane, chosen.pane.trace.worker[chosen.record]!);
  };
  const actions: Readonly<Record<string, () => void>> = {
    f: () => app.focus(),
    F: () => app.showAll(),
    Home: () => app.showAll(),
    g: () => app.showStep(),
    ".": () => app.setStep((app.main?.step ?? 0) + 1, true),
    ",": () => app.setStep((app.main?.step ?? 0) - 1, true),
    "[": () => app.follow(-1),
    "]": () => app.follow(1),
    c: () => app.setCritical(!app.critical),
    n: () => app.nextMatch(1),
    N: () => app.nextMatch(-1),
    "/": () => commands.focusSearch(),
    e: toggleOpen,
    E: () => {
      for (const pane of app.panes) pane.rows.closeAll();
      app.changed("view");
    },
    ArrowLeft: () => app.move(-1, 0),
    ArrowRight: () => app.move(1, 0),
    ArrowUp: () => app.move(0, -1),
    ArrowDown: () => app.move(0, 1),
    "+": () => scaleRows(1.3),
    "=": () => scaleRows(1.3),
    "-": () => scaleRows(1 / 1.3),
    Escape: () => app.clear(),
    i: () => commands.togglePanel(),
    t: () => commands.toggleTheme(),
    o: () => commands.openFile(false),
    "?": () => commands.help(),
  };
  MODES.forEach((mode, index) => {
    (actions as Record<string, () => void>)[String(index + 1)] = () => app.setMode(mode);
  });

  window.addEventListener("keydown", (event) => {
    if (typing(event) || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const letter = event.key.toLowerCase();
    if (["w", "a", "s", "d"].includes(letter)) {
      event.preventDefault();
      app.motion.press(letter, event.shiftKey);
      return;
    }
    const action = actions[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action();
  });
  window.addEventListener("keyup", (event) => app.motion.release(event.key.toLowerCase()));
  window.addEventListener("blur", () => app.motion.releaseAll());
}
