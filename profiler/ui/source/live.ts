/** Records steps of the server that serves this page, once or again and again. */

import { make } from "./dom.ts";
import type { Opener } from "./files.ts";
import { asObject, asText } from "./json.ts";

/** Shared with the playground, which has the same origin. */
const KEY_NAME = "megavm-playground-api-key";
const PAUSE_MS = 1000;
const MOST_STEPS = 10_000;

/** What the server refused, in its own words. */
class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Where the server records; null: this page does not come from a server that does. */
export function takeLive(): string | null {
  const element = document.querySelector<HTMLMetaElement>('meta[name="record"]');
  element?.remove();
  return element?.content ?? null;
}

function storedKey(): string {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return "";
  }
}

function storeKey(key: string): void {
  try {
    sessionStorage.setItem(KEY_NAME, key);
  } catch {
    // Then it holds for this visit.
  }
}

async function refusal(answer: Response): Promise<Refusal> {
  const body: unknown = await answer.json().catch(() => null);
  const message = asText(asObject(asObject(body)["error"])["message"]);
  return new Refusal(answer.status, message || `The server answers with status ${answer.status}.`);
}

function pause(signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const timer = setTimeout(done, PAUSE_MS);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    });
  });
}

export class Live {
  readonly element = make("form", "live");
  private readonly steps = make("input", "steps");
  private readonly refresh = make("input");
  private readonly key = make("input");
  private readonly keyLabel = make("label", "group", "API key ", this.key);
  /** Why the server refused the key, beside it. */
  private readonly refused = make("span", "refused");
  private readonly record = make("button", "", "Record");
  private running: AbortController | null = null;

  constructor(
    private readonly url: string,
    private readonly opener: Opener,
    private readonly status: (text: string, isError: boolean) => void,
  ) {
    Object.assign(this.steps, { type: "number", min: "1", max: String(MOST_STEPS), value: "20", required: true });
    this.steps.setAttribute("aria-label", "steps to record");
    this.refresh.type = "checkbox";
    this.key.type = "password";
    this.key.autocomplete = "off";
    this.key.value = storedKey();
    this.keyLabel.hidden = this.key.value === "";
    this.refused.setAttribute("role", "alert");
    this.refresh.title = "record again and again, until it is stopped";
    // Who wants newer and newer traces wants a first one.
    this.refresh.addEventListener("change", () => {
      if (this.refresh.checked && this.running === null) this.element.requestSubmit();
    });
    this.record.title = "record the next steps of this server and show them";
    this.element.append(
      make("span", "group", "This server: the next", this.steps, "steps", this.record),
      make("label", "group", this.refresh, " refresh"),
      this.keyLabel,
      this.refused,
    );
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running === null) void this.run();
      else this.running.abort();
    });
  }

  /** Record until it is stopped or fails; once, unless the trace is to be refreshed. */
  private async run(): Promise<void> {
    const running = (this.running = new AbortController());
    this.record.textContent = "Stop";
    this.refused.textContent = "";
    storeKey(this.key.value);
    try {
      do await this.once(running.signal);
      while (this.refresh.checked && !running.signal.aborted);
    } catch (error) {
      this.fail(error, running.signal);
    } finally {
      this.running = null;
      this.record.textContent = "Record";
    }
  }

  private async once(signal: AbortSignal): Promise<void> {
    const steps = Number(this.steps.value);
    this.status(`Recording the next ${steps === 1 ? "step" : `${steps} steps`}: let the model answer something.`, false);
    try {
      const answer = await this.ask(steps, signal);
      const named = /filename="?([^";]+)/.exec(answer.headers.get("Content-Disposition") ?? "");
      const file = await answer.blob();
      await this.opener.replace({ name: named?.[1] ?? "server.megatrace", read: () => Promise.resolve(file) });
      if (this.refresh.checked) await pause(signal);
    } catch (error) {
      // No step ran: one will.
      if (!(error instanceof Refusal && error.status === 408 && this.refresh.checked)) throw error;
    }
  }

  private async ask(steps: number, signal: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = { "Content-Type": "application/json" };
    if (this.key.value !== "") headers["Authorization"] = `Bearer ${this.key.value}`;
    const answer = await fetch(this.url, { method: "POST", headers, body: JSON.stringify({ steps }), signal });
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }

  private fail(error: unknown, signal: AbortSignal): void {
    if (signal.aborted) this.status("", false);
    else if (error instanceof Refusal && error.status === 401) {
      this.status("", false);
      this.refused.textContent = error.message;
      this.keyLabel.hidden = false;
      this.key.focus();
    } else if (error instanceof Refusal) this.status(error.message, true);
    else if (error instanceof TypeError) this.status("The server does not answer: is it still running?", true);
    else throw error;
  }
}
