/** Saves the page with its traces in it, as one file that needs nothing else. */

import type { App } from "./app.ts";
import { encodeBase64, pipe } from "./files.ts";

/** The page as it was loaded. Must be taken before anything is added to it. */
export function pristinePage(): string {
  return `<!doctype html>\n${document.documentElement.outerHTML}`;
}

/** A trace as an element of the page: unpacked by the page, executed by nobody. */
async function embed(file: Blob, name: string): Promise<string> {
  const packed = await pipe(file, new CompressionStream("gzip")).arrayBuffer();
  const element = document.createElement("script");
  element.type = "application/octet-stream";
  element.dataset["name"] = name;
  element.textContent = encodeBase64(new Uint8Array(packed));
  return element.outerHTML;
}

export async function saveAsHtml(app: App, page: string): Promise<void> {
  const traces: string[] = [];
  for (const { trace } of app.panes) traces.push(await embed(trace.file, trace.name));
  const at = page.indexOf("<script>");
  const blob = new Blob([page.slice(0, at), ...traces, page.slice(at)], { type: "text/html" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${app.main?.trace.name.replace(/\.megatrace$/, "") ?? "trace"}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
