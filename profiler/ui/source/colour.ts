/** Colours: themes, what a record is coloured by, and the tables that the raster paints from. */

import PALETTE from "./palette.json";
import { BARRIER, COMPUTING, CONSUMER, FINISH, LOAD, LOADER, LOADING, ROLES, type Role, SHADES, type Shade } from "./roles.ts";
import { STATES, WAIT_BARRIER, WAIT_WORDS, WORDS, WORK } from "./roles.ts";
import type { Trace } from "./trace.ts";

export const MODES = ["phase", "kind", "layer", "role", "wait"] as const;
export type Mode = (typeof MODES)[number];

export type Rgb = readonly [number, number, number];

const { computing, loading, barrier, words } = PALETTE.states;
const STATE_COLOURS = [computing, loading, barrier, words] as unknown as readonly [Rgb, Rgb, Rgb, Rgb];
const WAIT_COLOURS = PALETTE.waits as unknown as readonly Rgb[];
const CONTROLLER_COLOUR = PALETTE.roles.controller as unknown as Rgb;
const STORER_COLOUR = PALETTE.roles.storer as unknown as Rgb;
const FIXED = new Map(Object.entries({ ...PALETTE.kinds, ...PALETTE.phases }) as unknown as [string, Rgb][]);

export interface Theme {
  readonly dark: boolean;
  readonly background: Rgb;
  readonly row: string;
  readonly band: string;
  readonly line: string;
  readonly strong: string;
  readonly text: string;
  readonly faint: string;
  readonly accent: string;
  readonly hatch: string;
  readonly path: string;
  readonly onSpan: string;
  readonly states: readonly [Rgb, Rgb, Rgb, Rgb, Rgb];
}

export const LIGHT: Theme = {
  dark: false,
  background: [255, 255, 255],
  row: "#ffffff",
  band: "#f4f6f9",
  line: "#dfe4ea",
  strong: "#9aa5b1",
  text: "#1c2733",
  faint: "#5d6b7a",
  accent: "#0b62d6",
  hatch: "rgba(20, 30, 45, 0.30)",
  path: "#d6006c",
  onSpan: "#060a14",
  states: [...STATE_COLOURS, [232, 236, 241]],
};

export const DARK: Theme = {
  dark: true,
  background: [20, 24, 31],
  row: "#14181f",
  band: "#1a1f28",
  line: "#2b323d",
  strong: "#5a6675",
  text: "#e3e8ee",
  faint: "#98a4b3",
  accent: "#62a8ff",
  hatch: "rgba(235, 240, 250, 0.26)",
  path: "#ff5fae",
  onSpan: "#060a14",
  states: [...STATE_COLOURS, [40, 47, 58]],
};

/** Waits up to these many nanoseconds, and the colour of longer ones last. */
const WAIT_LIMITS = [100, 300, 1000, 3000, 10000];
const WAIT_NAMES = ["under 0.1 µs", "under 0.3 µs", "under 1 µs", "under 3 µs", "under 10 µs", "10 µs and more"];

/** A bit of a code: the record is not what is being looked at. */
export const DIM = 128;
const MAX_CODES = 120;

export function css([r, g, b]: Rgb): string {
  return `rgb(${Math.round(r)} ${Math.round(g)} ${Math.round(b)})`;
}

export function mix(a: Rgb, b: Rgb, part: number): Rgb {
  return [a[0] + (b[0] - a[0]) * part, a[1] + (b[1] - a[1]) * part, a[2] + (b[2] - a[2]) * part];
}

export function pack([r, g, b]: Rgb): number {
  return ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
}

/** How further phases of a kind differ from the first: mixed with white (above 0) or black. */
const VARIANTS = [0, 0.38, -0.24, 0.6, -0.4, 0.2];
const variants = new Map<string, Rgb>();
const phasesOf = new Map<string, number>();

function fixedColour(name: string): Rgb | undefined {
  return FIXED.get(name) ?? variants.get(name);
}

/** The colour of a kind or phase: its own, whatever trace it is in; of names that nobody knows, one by their letters. */
export function colourOfName(name: string): Rgb {
  const found = fixedColour(name);
  if (found !== undefined) return found;
  let hash = 2166136261;
  for (let i = 0; i < name.length; i++) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
  const all = [...FIXED.values()];
  const colour = all[(hash >>> 8) % all.length]!;
  return mix(colour, hash & 1 ? [255, 255, 255] : [0, 0, 0], hash & 1 ? 0.3 : 0.2);
}

/** Give the phases of a program that have no colour of their own shades of the kind that executes them. */
export function learnPhase(phase: string, kind: string): void {
  if (fixedColour(phase) !== undefined) return;
  const number = phasesOf.get(kind) ?? 0;
  phasesOf.set(kind, number + 1);
  const shift = VARIANTS[number % VARIANTS.length]!;
  variants.set(phase, mix(colourOfName(kind), shift > 0 ? [255, 255, 255] : [0, 0, 0], Math.abs(shift)));
}

/** Layers go from blue to yellow, every second one lighter, so that neighbours differ. */
function colourOfLayer(layer: number, last: number): Rgb {
  if (layer < 0) return [126, 140, 164];
  const [first, end] = PALETTE.layers as unknown as [Rgb, Rgb];
  return mix(mix(first, end, layer / Math.max(1, last)), [255, 255, 255], layer % 2 ? 0.45 : 0);
}

export interface LegendEntry {
  readonly name: string;
  readonly colour: string;
  /** The query that finds what has this colour. */
  readonly query: string;
}

/** Code of each record, and the colour of each code in each role and shade. */
export interface Painting {
  readonly codes: Uint8Array;
  readonly tables: readonly (readonly Uint32Array[])[];
  readonly legend: readonly LegendEntry[];
  /** Whether waiting is as strong in colour as the rest. */
  readonly strong: boolean;
}

/** What a record's code stands for in a mode. */
function classes(trace: Trace, mode: Mode): { of: (r: number) => number; colours: Rgb[]; legend: LegendEntry[] } {
  const names = (list: readonly string[], key: string): { colours: Rgb[]; legend: LegendEntry[] } => {
    const colours = list.slice(0, MAX_CODES).map(colourOfName);
    const legend = colours.map((c, i) => ({ name: list[i]!, colour: css(c), query: `${key}:${word(list[i]!)}` }));
    return { colours, legend };
  };
  switch (mode) {
    case "kind":
      return { of: (r) => trace.kind[r]!, ...names(trace.kinds, "kind") };
    case "phase":
      return { of: (r) => trace.phase[r]!, ...names(trace.phases, "phase") };
    case "layer": {
      let last = -1;
      for (const layer of trace.layer) if (layer > last) last = layer;
      const layers = Array.from({ length: Math.min(last + 2, MAX_CODES) }, (_, i) => i - 1);
      const colours = layers.map((layer) => colourOfLayer(layer, last));
      const legend = layers.map((layer, i) => ({
        name: layer < 0 ? "none" : String(layer),
        colour: css(colours[i]!),
        query: `layer:${layer < 0 ? "none" : layer}`,
      }));
      return { of: (r) => trace.layer[r]! + 1, colours, legend };
    }
    case "wait": {
      const legend = WAIT_NAMES.map((name, i) => {
        const low = i ? `wait>=${WAIT_LIMITS[i - 1]}ns` : "";
        const high = i < WAIT_LIMITS.length ? `wait<${WAIT_LIMITS[i]}ns` : "";
        return { name, colour: css(WAIT_COLOURS[i]!), query: `${low} ${high}`.trim() };
      });
      const of = (r: number): number => {
        const wait = trace.waitOf(r);
        let code = 0;
        while (code < WAIT_LIMITS.length && wait >= WAIT_LIMITS[code]!) code++;
        return code;
      };
      return { of, colours: [...WAIT_COLOURS], legend };
    }
    case "role":
      return { of: () => 0, colours: [CONTROLLER_COLOUR], legend: [] };
  }
}

/** A name as one word of a query. */
export function word(name: string): string {
  return /[\s"]/.test(name) || name === "" ? `"${name.replace(/"/g, "")}"` : name;
}

function roleColour(role: Role, shade: Shade, theme: Theme): Rgb {
  const { states, background } = theme;
  if (role === LOADER) return shade === WORK ? states[LOADING] : mix(states[LOADING], background, 0.4);
  if (role !== CONSUMER) return role === 0 ? CONTROLLER_COLOUR : STORER_COLOUR;
  switch (shade) {
    case WAIT_BARRIER:
      return states[BARRIER];
    case WAIT_WORDS:
      return states[WORDS];
    case LOAD:
      return states[LOADING];
    case WORK:
      return states[COMPUTING];
    case FINISH:
      return mix(states[COMPUTING], background, 0.4);
  }
}

/** How much of the background is in each shade of a colour. */
const FADED: Readonly<Record<Shade, number>> = {
  [WAIT_BARRIER]: 0.66,
  [WAIT_WORDS]: 0.66,
  [LOAD]: 0.22,
  [WORK]: 0,
  [FINISH]: 0.42,
};

export function paint(trace: Trace, mode: Mode, theme: Theme, dimmed: ((record: number) => boolean) | null): Painting {
  const { of, colours, legend } = classes(trace, mode);
  const codes = new Uint8Array(trace.count);
  for (let r = 0; r < trace.count; r++) {
    codes[r] = (of(r) % MAX_CODES) | (dimmed !== null && dimmed(r) ? DIM : 0);
  }
  const tables = ROLES.map((_, role) =>
    SHADES.map((shade) => {
      const table = new Uint32Array(256);
      colours.forEach((colour, code) => {
        const full = mode === "role" ? roleColour(role as Role, shade, theme) : mix(colour, theme.background, FADED[shade]);
        const grey = (full[0] + full[1] + full[2]) / 3;
        table[code] = pack(full);
        table[code + DIM] = pack(mix(mix(full, [grey, grey, grey], 0.6), theme.background, 0.65));
      });
      return table;
    }),
  );
  const roles: LegendEntry[] = [
    ...STATES.slice(0, 4).map((name, i) => ({ name, colour: css(theme.states[i]!), query: "" })),
    { name: "finish", colour: css(mix(theme.states[COMPUTING], theme.background, 0.4)), query: "" },
    { name: "controller", colour: css(CONTROLLER_COLOUR), query: "" },
    { name: "storer", colour: css(STORER_COLOUR), query: "" },
  ];
  return { codes, tables, legend: mode === "role" ? roles : legend, strong: mode === "role" };
}
