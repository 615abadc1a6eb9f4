/** The window of time that is shown, in nanoseconds from the point that panes are aligned at. */

const MIN_SPAN = 20;

export class View {
  begin = 0;
  end = 1;

  constructor(
    private low: number,
    private high: number,
  ) {
    this.show(low, high);
  }

  get span(): number {
    return this.end - this.begin;
  }

  /** The times that there are. The window may stick out by a little. */
  setLimits(low: number, high: number): void {
    this.low = low;
    this.high = Math.max(high, low + MIN_SPAN);
    this.show(this.begin, this.end);
  }

  get limits(): readonly [number, number] {
    return [this.low, this.high];
  }

  show(begin: number, end: number): void {
    const whole = this.high - this.low;
    const margin = 0.02 * whole;
    let span = Math.max(MIN_SPAN, Math.min(end - begin, whole + 2 * margin));
    if (!Number.isFinite(span)) span = whole;
    const middle = Number.isFinite(begin + end) ? (begin + end) / 2 : (this.low + this.high) / 2;
    let from = middle - span / 2;
    // At least half of the window shows something.
    from = Math.max(this.low - Math.max(margin, span / 2), Math.min(from, this.high + Math.max(margin, span / 2) - span));
    if (span >= whole) from = (this.low + this.high - span) / 2;
    this.begin = from;
    this.end = from + span;
  }

  /** Zoom by a factor (below 1: in) around a time that stays where it is. */
  zoom(at: number, factor: number): void {
    const whole = (this.high - this.low) * 1.04;
    const span = Math.max(MIN_SPAN, Math.min(this.span * factor, whole));
    const part = (at - this.begin) / this.span;
    const begin = at - part * span;
    this.show(begin, begin + span);
  }

  pan(by: number): void {
    this.show(this.begin + by, this.end + by);
  }
}
