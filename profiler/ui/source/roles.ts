/** The roles of a worker, what their spans consist of, and what a worker does at a point in time. */

export const ROLES = ["controller", "loader", "consumer", "storer"] as const;
export type Role = 0 | 1 | 2 | 3;
export const CONTROLLER = 0;
export const LOADER = 1;
export const CONSUMER = 2;
export const STORER = 3;

/** What a worker does, as its consumers see it. While they compute, later loads go on beside them. */
export const STATES = ["computing", "loading", "barrier", "words", "idle"] as const;
export type State = 0 | 1 | 2 | 3 | 4;
export const COMPUTING = 0;
export const LOADING = 1;
export const BARRIER = 2;
export const WORDS = 3;
export const IDLE = 4;
export const STATE_HELP = [
  "consumers compute and store",
  "consumers have their inputs and take weights as they arrive: until the last load is there",
  "consumers wait for barriers of the header",
  "consumers wait for tagged words",
  "consumers have no instruction",
] as const;

/** How a segment of a span is drawn. */
export type Shade = 0 | 1 | 2 | 3 | 4;
export const WAIT_BARRIER = 0;
export const WAIT_WORDS = 1;
export const LOAD = 2;
export const WORK = 3;
export const FINISH = 4;
export const SHADES: readonly Shade[] = [WAIT_BARRIER, WAIT_WORDS, LOAD, WORK, FINISH];
export const SHADE_NAMES = ["waits for barriers", "waits for words", "loads", "computes", "finishes"] as const;

/** The shades of the segments of each role's span. */
export const SEGMENTS: readonly (readonly Shade[])[] = [[WORK], [WORK, FINISH], SHADES, [FINISH, WORK]];
