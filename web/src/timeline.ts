// An attempt's life as spans of one kind each, from its record alone. Pure.
import type { Attempt } from "./api/types";
import { when } from "./format";
import type { Part } from "./states";

export interface Segment {
  part: Part;
  from: number;
  to: number;
}

/** The spans of an attempt in order, milliseconds; `now` ends what has not ended. */
export function segmentsOf(attempt: Attempt, now: number): Segment[] {
  const submitted = when(attempt.submitted_at);
  const started = when(attempt.started_at);
  const end = when(attempt.ended_at) ?? now;
  const found: Segment[] = [];
  const add = (part: Part, from: number, to: number) => {
    if (to > from) found.push({ part, from, to });
  };
  if (submitted !== null) add("queued", submitted, started ?? end);
  if (started === null) return found;
  const launches = attempt.incarnations.filter((one) => when(one.started_at) !== null);
  let cursor = started;
  for (const launch of launches) {
    const from = Math.max(cursor, when(launch.started_at) ?? cursor);
    add("starting", cursor, from);
    const stop = when(attempt.stop_requested_at);
    const ended = Math.min(end, when(launch.ended_at) ?? end);
    const isLast = launch === launches.at(-1);
    const trained = isLast && stop !== null ? Math.max(from, Math.min(stop, ended)) : ended;
    add("training", from, trained);
    if (isLast) add("flushing", trained, ended);
    cursor = Math.max(cursor, ended);
  }
  if (launches.length === 0) add("starting", started, end);
  return withLoss(found, attempt);
}

/** The steps after the last commit of an attempt that is over had to be trained again. */
function withLoss(found: Segment[], attempt: Attempt): Segment[] {
  const { last_step: last, ended_at: ended } = attempt;
  const base = attempt.committed_step ?? attempt.resumed_step ?? 0;
  const first = attempt.first_step ?? attempt.resumed_step ?? 0;
  if (ended === null || last === null || last <= base || last <= first) return found;
  const training = found.filter((one) => one.part === "training");
  const whole = training.reduce((sum, one) => sum + one.to - one.from, 0);
  let lost = whole * Math.min(1, (last - base) / (last - first + 1));
  const cut = found.map((one) => ({ ...one }));
  for (let index = cut.length - 1; index >= 0 && lost > 0; index -= 1) {
    const one = cut[index];
    if (one?.part !== "training") continue;
    const taken = Math.min(lost, one.to - one.from);
    cut.splice(index + 1, 0, { part: "lost", from: one.to - taken, to: one.to });
    one.to -= taken;
    lost -= taken;
  }
  return cut.filter((one) => one.to > one.from);
}

const STEPS_MS = [1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400]
  .map((seconds) => seconds * 1000);

/** Round moments between two, about `count` of them. */
export function ticks(from: number, to: number, count: number): number[] {
  const step = STEPS_MS.find((one) => (to - from) / one <= count) ?? STEPS_MS.at(-1) ?? 1;
  const first = Math.ceil(from / step) * step;
  const found: number[] = [];
  for (let at = first; at <= to && found.length <= count; at += step) found.push(at);
  return found;
}
