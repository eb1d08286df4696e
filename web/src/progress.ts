// How long a run still needs at the pace of its productive time so far. Pure.

interface Paced {
  state: string;
  step: number | null;
  steps_total?: number | null;
  goodput?: { training_s: number } | null;
}

/** Seconds left of a running run whose number of steps is known; null where nobody can say. */
export function timeLeft({ state, step, steps_total: total, goodput }: Paced): number | null {
  if (state !== "running" || !step || !total || step >= total || !goodput) return null;
  return goodput.training_s > 0 ? ((total - step) * goodput.training_s) / step : null;
}
