/** Values of JSON from a file: what has the wrong type counts as absent. */

export type Json = Record<string, unknown>;

export function asObject(value: unknown): Json {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Json) : {};
}

export function asList(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

export function asText(value: unknown, otherwise = ""): string {
  return typeof value === "string" ? value : otherwise;
}
