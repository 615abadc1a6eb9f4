/** Movement of the view over several frames: keys that are held, and glides to another window. */

import type { View } from "./view.ts";

const PAN_SPEED = 1.1; // windows per second
const ZOOM_SPEED = 3.2; // natural logarithm of the factor per second
const GLIDE_MS = 180;
const EASE_MS = 60;

export class Motion {
  private readonly held = new Set<string>();
  private fast = false;
  private panRate = 0;
  private zoomRate = 0;
  private last = 0;
  private running = false;
  private target: { from: [number, number]; to: [number, number]; start: number } | null = null;
  /** The time that zooming keeps in place, null: the middle. */
  anchor: number | null = null;

  constructor(
    private readonly view: View,
    private readonly moved: () => void,
  ) {}

  /** Keys w, a, s, d go down and up. */
  press(key: string, fast: boolean): void {
    this.held.add(key);
    this.fast = fast;
    this.target = null;
    this.run();
  }

  release(key: string): void {
    this.held.delete(key);
  }

  releaseAll(): void {
    this.held.clear();
  }

  stop(): void {
    this.target = null;
  }

  /** Move to a window; at once for those who want no animation. */
  glide(begin: number, end: number): void {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.view.show(begin, end);
      this.moved();
      return;
    }
    this.target = { from: [this.view.begin, this.view.end], to: [begin, end], start: performance.now() };
    this.run();
  }

  private run(): void {
    if (this.running) return;
    this.running = true;
    this.last = performance.now();
    requestAnimationFrame((now) => this.frame(now));
  }

  private frame(now: number): void {
    const passed = Math.max(1, Math.min(50, now - this.last));
    this.last = now;
    const wanted = (plus: string, minus: string): number =>
      ((this.held.has(plus) ? 1 : 0) - (this.held.has(minus) ? 1 : 0)) * (this.fast ? 2.5 : 1);
    const ease = 1 - Math.exp(-passed / EASE_MS);
    this.panRate += (wanted("d", "a") * PAN_SPEED - this.panRate) * ease;
    this.zoomRate += (wanted("s", "w") * ZOOM_SPEED - this.zoomRate) * ease;
    let moving = this.held.size > 0;
    if (Math.abs(this.panRate) > 0.01 || Math.abs(this.zoomRate) > 0.01) {
      const middle = this.view.begin + this.view.span / 2;
      const inside = this.anchor !== null && this.anchor > this.view.begin && this.anchor < this.view.end;
      this.view.zoom(inside ? this.anchor! : middle, Math.exp((this.zoomRate * passed) / 1000));
      this.view.pan((this.panRate * this.view.span * passed) / 1000);
      moving = true;
    }
    if (this.target !== null) {
      const { from, to, start } = this.target;
      const part = Math.min(1, Math.max(0, (now - start) / GLIDE_MS));
      const eased = 1 - (1 - part) ** 3;
      this.view.show(from[0] + (to[0] - from[0]) * eased, from[1] + (to[1] - from[1]) * eased);
      if (part >= 1) this.target = null;
      moving = true;
    }
    this.moved();
    if (moving) requestAnimationFrame((next) => this.frame(next));
    else this.running = false;
  }
}
