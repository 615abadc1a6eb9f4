// Builds the page: source/ becomes one file that needs nothing else, dist/index.html.
// The page carries a hash of what it was built from (tests/profiler/ui/test_build.py computes the same).

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = dirname(fileURLToPath(import.meta.url));

function hashOfSources() {
  const names = ["build.mjs", "package.json", "tsconfig.json"];
  for (const name of readdirSync(join(root, "source"))) names.push(`source/${name}`);
  const hash = createHash("sha256");
  for (const name of names.sort()) {
    hash.update(`${name}\n`);
    hash.update(readFileSync(join(root, name)));
    hash.update("\n");
  }
  return hash.digest("hex");
}

const digest = (text) => createHash("sha256").update(text).digest("base64");

const bundle = async (entry) => {
  const { outputFiles } = await build({
    entryPoints: [join(root, "source", entry)],
    bundle: true,
    minify: true,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    write: false,
    logLevel: "warning",
  });
  return outputFiles[0].text.trim();
};

const script = await bundle("main.ts");
const style = await bundle("style.css");
if (/<\/script|<!--/i.test(script) || /<\/style/i.test(style)) throw new Error("the bundle would end its element");
const page = readFileSync(join(root, "source/index.html"), "utf8")
  .replace("SCRIPT_HASH", () => digest(script))
  .replace("STYLE_HASH", () => digest(style))
  .replace("SOURCES_HASH", hashOfSources)
  .replace("<style>STYLE<", () => `<style>${style}<`)
  .replace("<script>SCRIPT<", () => `<script>${script}<`);
mkdirSync(join(root, "dist"), { recursive: true });
writeFileSync(join(root, "dist/index.html"), page);
console.log(`dist/index.html: ${(page.length / 1000).toFixed(1)} KB`);
