/** Puts the page together and opens the trace that came with it. */

import { announce } from "./announce.ts";
import { App } from "./app.ts";
import { byId, button, make } from "./dom.ts";
import { Opener, takeEmbedded, takeServed } from "./files.ts";
import { makeHelp } from "./help.ts";
import { listen } from "./input.ts";
import { Live, takeLive } from "./live.ts";
import { Link } from "./link.ts";
import { Panel } from "./panel.ts";
import { pristinePage, saveAsHtml } from "./save.ts";
import { Toolbar } from "./toolbar.ts";
import { Tooltip } from "./tooltip.ts";

const THEME_KEY = "megavm-profiler-theme";

/** The chosen theme; the system's until one is chosen. Pages in files may not remember. */
function storedTheme(): string | null {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function storeTheme(dark: boolean): void {
  try {
    localStorage.setItem(THEME_KEY, dark ? "dark" : "light");
  } catch {
    // Then it holds for this visit.
  }
}

function start(): void {
  const embedded = takeEmbedded();
  const served = takeServed();
  const recordUrl = takeLive();
  const page = pristinePage();

  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = storedTheme();
  const root = document.documentElement;
  const stage = byId("stage");
  const app = new App(stage, stored === null ? system.matches : stored === "dark");
  const showTheme = (): void => {
    root.dataset["theme"] = app.theme.dark ? "dark" : "light";
  };
  showTheme();
  app.on(["theme"], showTheme);
  system.addEventListener("change", () => {
    if (storedTheme() === null) app.setTheme(system.matches);
  });

  const message = byId("message");
  const status = (text: string, isError: boolean): void => {
    message.textContent = text;
    message.hidden = text === "";
    message.classList.toggle("error", isError);
    message.setAttribute("role", isError ? "alert" : "status");
  };
  message.addEventListener("click", () => status("", false));
  const opener = new Opener(app, status);
  const help = makeHelp();
  const actions = {
    openFile: (beside: boolean): void => opener.pick(beside),
    saveHtml: (): void => {
      if (app.main === undefined) return;
      status("Packing the trace …", false);
      void saveAsHtml(app, page).then(() => status("", false));
    },
    toggleTheme: (): void => {
      app.setTheme(!app.theme.dark);
      storeTheme(app.theme.dark);
    },
    togglePanel: (): void => {
      document.body.classList.toggle("wide");
    },
    help: (): void => (help.open ? help.close() : help.showModal()),
    focusSearch: (): void => toolbar.focusSearch(),
  };
  const toolbar = new Toolbar(app, actions);
  byId("bar").append(toolbar.element);
  if (recordUrl !== null) byId("bar").append(new Live(recordUrl, opener, status).element);
  byId("bar").append(toolbar.legend, announce(app));
  const panel = new Panel(app, () => opener.pick(true));
  byId("main").append(panel.element);
  new Tooltip(app, stage);
  listen(app, actions);
  const link = new Link(app);

  const welcome = byId("welcome");
  welcome.append(
    make("h1", "", "megavm profiler"),
    make("p", "", "Drop a .megatrace file here, or"),
    button("Open a trace", "", () => opener.pick(false), "primary"),
    make("p", "", "Two files at once are compared. “megavm profile MODEL -o run.megatrace” records one."),
    make("p", "faint", `Files stay on this computer: this page talks to ${recordUrl === null ? "nobody" : "this server alone, to record"}.`),
  );
  app.on(["panes"], () => {
    document.body.classList.toggle("empty", app.main === undefined);
    app.stage.overlay.focus({ preventScroll: true });
  });

  const sources = embedded.length > 0 ? embedded : served;
  if (sources.length > 0) void opener.openAll(sources, false).then((opened) => opened && link.restore());
  else app.on(["panes"], () => link.restore());
  // For a page that hands its trace over, for tests, and for people at the console.
  const openTrace = (file: Blob, name: string): Promise<boolean> =>
    opener.openAll([{ name, read: () => Promise.resolve(file) }], false);
  Object.assign(window, { profiler: app, openTrace });
}

start();
