// What an operator's action costs: steps since the newest checkpoint, and the time until the run
// trains again. Pure functions.
import type { Run, Segment } from "./api/types";
import { count, span, when } from "./format";
import { committedStep, stepOf } from "./progress";

/** The steps since the newest checkpoint, which an end without another one loses; null if no step
    is known. */
export function unsavedSteps(run: Run): number | null {
  const step = stepOf(run);
  if (step === null) return null;
  const resumed = run.attempts.at(-1)?.resumed_step ?? 0;
  const saved = run.saves_by_holdfast === false ? 0 : Math.max(committedStep(run) ?? 0, resumed);
  return Math.max(0, step - saved);
}

/** "12 steps (24 s of training)", for a number of steps. */
export function stepsWords(steps: number, pace: number | null | undefined): string {
  const time = pace && steps > 0 ? ` (${span(steps * pace)} of training)` : "";
  return `${count(steps)} step${steps === 1 ? "" : "s"}${time}`;
}

const BEFORE_TRAINING = new Set(["queued", "starting", "loading"]);

/** How long each earlier attempt took from its submission to its first step, in seconds. */
export function startsOf(segments: Segment[]): number[] {
  const waits = new Map<number, { seconds: number; trains: boolean }>();
  for (const { attempt, part, began_at: began, ended_at: ended } of segments) {
    const [from, to] = [when(began), when(ended)];
    const wait = waits.get(attempt) ?? { seconds: 0, trains: false };
    waits.set(attempt, wait);
    if (wait.trains || from === null || to === null) continue;
    if (BEFORE_TRAINING.has(part)) wait.seconds += (to - from) / 1000;
    else if (part === "training" || part === "lost") wait.trains = true;
  }
  return [...waits.values()].filter((one) => one.trains).map((one) => one.seconds);
}

/** When the run trains again after an action, judged by its earlier attempts; "" if it has none. */
export function returnWords(segments: Segment[]): string {
  const starts = startsOf(segments).toSorted((one, other) => one - other);
  const median = starts[Math.floor((starts.length - 1) / 2)];
  if (median === undefined) return "";
  const by = starts.length === 1 ? "as at this run's first start" : "the median of its starts";
  return `Training then continues in about ${span(median)}, ${by}.`;
}
