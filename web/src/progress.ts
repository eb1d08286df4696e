// A run's progress and the time left. Pure functions.
import type { Run } from "./api/types";

interface Stepped {
  step: number | null;
  live_step?: number | null;
}

/** The newest step from heartbeats and commits; null before the first one. */
export function stepOf({ step, live_step: live }: Stepped): number | null {
  const newest = Math.max(live ?? -1, step ?? -1);
  return newest < 0 ? null : newest;
}

interface Paced extends Stepped {
  state: string;
  steps_total?: number | null;
  /** The current median duration of a step, in seconds. */
  step_s?: number | null;
}

/** The seconds left for a running run at its current pace; null if unknown. */
export function timeLeft(run: Paced): number | null {
  const { state, steps_total: total, step_s: pace } = run;
  const step = stepOf(run);
  if (state !== "running" || step === null || !total || step >= total || !pace) return null;
  return (total - step) * pace;
}

/** The newest committed step that the run would resume from. */
export function committedStep({ state, step, attempts }: Run): number | null {
  // For a completed run, `step` is the last trained step. An imported run has trained no step.
  if (state !== "completed" || attempts.length === 0) return step;
  return attempts.findLast((one) => one.committed_step !== null)?.committed_step ?? null;
}
