import { FileError } from "./safetensors.ts";

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
