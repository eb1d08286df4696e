// How far a run is, and how long it still needs. Pure.
import type { Run } from "./api/types";

interface Stepped {
  step: number | null;
  live_step?: number | null;
}

/** The newest step that is known: heartbeats are ahead of commits. Null before the first one. */
export function stepOf({ step, live_step: live }: Stepped): number | null {
  const newest = Math.max(live ?? -1, step ?? -1);
  return newest < 0 ? null : newest;
}

interface Paced extends Stepped {
  state: string;
  steps_total?: number | null;
  /** The median duration of a step now, seconds. */
  step_s?: number | null;
}

/** Seconds left of a running run at the pace of its latest steps; null where it is not known. */
export function timeLeft(run: Paced): number | null {
  const { state, steps_total: total, step_s: pace } = run;
  const step = stepOf(run);
  if (state !== "running" || step === null || !total || step >= total || !pace) return null;
  return (total - step) * pace;
}

/** The newest committed step that the run would resume from. */
export function committedStep({ state, step, attempts }: Run): number | null {
  // Of a completed run, `step` is the last one that was trained.
  if (state !== "completed") return step;
  return attempts.findLast((one) => one.committed_step !== null)?.committed_step ?? null;
}
