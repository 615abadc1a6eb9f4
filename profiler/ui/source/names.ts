import { FileError } from "./safetensors.ts";

/**
 * A name from a file as it is shown. One that is written from right to left, or turns the text around it, is enclosed
 * in marks (first strong isolate, pop directional isolate) so that it does not move its neighbours.
 */
export function isolate(name: string): string {
  return /[\u0590-\u08ff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]/.test(name) ? `\u2068${name}\u2069` : name;
}

/** Numbers for names, in order of appearance. */
export class Names {
  readonly list: string[] = [];
  private readonly numbers = new Map<string, number>();

  number(name: string): number {
    let number = this.numbers.get(name);
    if (number === undefined) {
      number = this.list.push(name) - 1;
      if (number > 65535) throw new FileError("The file has more than 65536 different names.");
      this.numbers.set(name, number);
    }
    return number;
  }
}
