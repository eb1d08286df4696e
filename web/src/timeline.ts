// Segments of attempts over time, and round times on an axis. Pure functions.
import type { Attempt, Segment } from "./api/types";
import { when } from "./format";
import { PARTS, type Part } from "./states";

export interface Drawn {
  attempt: number;
  part: Part;
  from: number;
  to: number;
}

const isPart = (word: string): word is Part => (PARTS as readonly string[]).includes(word);

/** An attempt's segments in milliseconds. The last one of a live attempt ends at `now`. */
export function segmentsOf(attempt: Attempt, segments: Segment[], now: number): Drawn[] {
  const found = segments.flatMap((one): Drawn[] => {
    const [from, to] = [when(one.began_at), when(one.ended_at)];
    if (one.attempt !== attempt.number || from === null || to === null) return [];
    return isPart(one.part) ? [{ attempt: attempt.number, part: one.part, from, to }] : [];
  });
  const last = found.at(-1);
  if (last && attempt.ended_at === null) last.to = Math.max(last.to, now);
  return found;
}

const STEPS_MS = [1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400]
  .map((seconds) => seconds * 1000);

/** About `count` round times between two times. */
export function ticks(from: number, to: number, count: number): number[] {
  const step = STEPS_MS.find((one) => (to - from) / one <= count) ?? STEPS_MS.at(-1) ?? 1;
  const first = Math.ceil(from / step) * step;
  const found: number[] = [];
  for (let at = first; at <= to && found.length <= count; at += step) found.push(at);
  return found;
}
