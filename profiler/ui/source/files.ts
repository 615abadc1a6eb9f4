/** Where traces come from: the page itself, the server that serves it, a picked file, a dropped one. */

import type { App } from "./app.ts";
import { FileError } from "./safetensors.ts";
import { Trace } from "./trace.ts";

/** A trace as it was handed to the page. */
export interface Source {
  readonly name: string;
  readonly read: () => Promise<Blob>;
}

const EMBEDDED = 'script[type="application/octet-stream"]';

function decodeBase64(text: string): Uint8Array<ArrayBuffer> {
  const clean = text.trim();
  const padding = clean.endsWith("==") ? 2 : clean.endsWith("=") ? 1 : 0;
  const out = new Uint8Array((clean.length / 4) * 3 - padding);
  // In pieces: one string of all bytes may be longer than a string can be.
  const piece = 4 << 18;
  for (let at = 0, to = 0; at < clean.length; at += piece) {
    const binary = atob(clean.slice(at, at + piece));
    for (let i = 0; i < binary.length; i++) out[to++] = binary.charCodeAt(i);
  }
  return out;
}

export function encodeBase64(bytes: Uint8Array): string {
  const parts: string[] = [];
  const piece = 3 << 13;
  for (let at = 0; at < bytes.length; at += piece) {
    parts.push(btoa(String.fromCharCode(...bytes.subarray(at, at + piece))));
  }
  return parts.join("");
}

export function pipe(file: Blob, through: CompressionStream | DecompressionStream): Response {
  return new Response(file.stream().pipeThrough(through));
}

/** Take the traces out of a page that was saved with them. */
export function takeEmbedded(): Source[] {
  return [...document.querySelectorAll<HTMLScriptElement>(EMBEDDED)].map((element) => {
    const text = element.textContent;
    const name = element.dataset["name"] ?? "trace";
    element.remove();
    return {
      name,
      read: async () => {
        try {
          return await pipe(new Blob([decodeBase64(text)]), new DecompressionStream("gzip")).blob();
        } catch {
          throw new FileError("The trace in this page is damaged: it cannot be unpacked.");
        }
      },
    };
  });
}

/** The traces that the server of this page has. */
export function takeServed(): Source[] {
  return [...document.querySelectorAll<HTMLMetaElement>('meta[name="trace"]')].map((element, i) => {
    const name = element.content;
    element.remove();
    return {
      name,
      read: async () => {
        const answer = await fetch(`trace/${i}`).catch(() => null);
        if (answer === null || !answer.ok) throw new FileError("The server does not give its trace: is it still running?");
        return answer.blob();
      },
    };
  });
}

export function fromFile(file: File): Source {
  return {
    name: file.name,
    read: () => Promise.resolve(file),
  };
}

/** What stands in place of the timeline, and opens files. */
export class Opener {
  private readonly picker = document.createElement("input");
  private beside = false;

  constructor(
    private readonly app: App,
    private readonly status: (text: string, isError: boolean) => void,
  ) {
    this.picker.type = "file";
    this.picker.accept = ".megatrace";
    this.picker.hidden = true;
    document.body.append(this.picker);
    this.picker.addEventListener("change", () => {
      const files = [...(this.picker.files ?? [])];
      this.picker.value = "";
      void this.openAll(files.map(fromFile), this.beside);
    });
    this.listenToDrops();
  }

  pick(beside: boolean): void {
    this.beside = beside && this.app.main !== undefined;
    this.picker.multiple = !this.beside;
    this.picker.click();
  }

  /** Open one trace, or two beside each other. */
  async openAll(sources: readonly Source[], beside: boolean): Promise<boolean> {
    let opened = true;
    for (const [i, source] of sources.slice(0, 2).entries()) {
      opened = (await this.read(source, (trace) => this.app.open(trace, beside || i > 0))) && opened;
    }
    return opened;
  }

  /** Show a newer trace in place of the one that is open. */
  async replace(source: Source): Promise<boolean> {
    return this.read(source, (trace) => this.app.replace(trace));
  }

  private async read(source: Source, show: (trace: Trace) => void): Promise<boolean> {
    this.status("Reading the trace …", false);
    try {
      const file = await source.read();
      const buffer = await file.arrayBuffer().catch(() => {
        throw new FileError("The file cannot be read.");
      });
      // Let the words above be seen before the work begins.
      await new Promise((done) => setTimeout(done, 20));
      show(new Trace(buffer, source.name, file));
      this.status("", false);
      return true;
    } catch (error) {
      if (error instanceof FileError) this.status(error.message, true);
      else if (error instanceof RangeError) this.status("The trace does not fit into memory.", true);
      else throw error;
      return false;
    }
  }

  private listenToDrops(): void {
    const { classList } = document.body;
    window.addEventListener("dragover", (event) => {
      event.preventDefault();
      classList.add("dropping");
    });
    window.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) classList.remove("dropping");
    });
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      classList.remove("dropping");
      const files = [...(event.dataTransfer?.files ?? [])];
      const box = this.app.stage.element.getBoundingClientRect();
      const lower = event.clientY > box.top + box.height / 2;
      if (files.length > 0) void this.openAll(files.map(fromFile), lower && this.app.main !== undefined);
    });
  }
}
