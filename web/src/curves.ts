// One curve from the values of several launches. For repeated steps, the later launch counts. Pure
// functions.
import type { Series } from "./api/types";

export interface Curve {
  name: string;
  x: number[];
  y: (number | null)[];
}

/** Distances between ticks: whole numbers, because steps are. */
export const STEP_INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
  .flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

const RATE = "steps per second";
// Losses come first, then the other metrics by name, then the rate.
const order = (name: string): string =>
  `${name === "loss" ? 0 : name.includes("loss") ? 1 : name === RATE ? 3 : 2}${name}`;

/** One curve for each metric and one for the rate, over all launches in order. */
export function stitch(series: Series[]): Curve[] {
  const launches = series
    .filter((one) => one.points.length > 0)
    .toSorted((a, b) => a.attempt - b.attempt || a.launch - b.launch);
  const kept = launches.flatMap((one, index) => {
    // Drop the steps that a later launch repeated.
    const until = Math.min(
      ...launches.slice(index + 1).map((later) => later.points[0]?.step ?? Infinity),
    );
    return one.points.filter((point) => point.step < until);
  });
  const names = new Set(kept.flatMap((point) => Object.keys(point.values)));
  const curves = [...names].map((name): Curve => {
    const points = kept.filter((point) => name in point.values);
    return {
      name,
      x: points.map((point) => point.step),
      y: points.map((point) => point.values[name]?.last ?? null),
    };
  });
  curves.push({
    name: RATE,
    x: kept.map((point) => point.step),
    y: kept.map((point) => point.steps_per_s),
  });
  return curves.toSorted((a, b) => order(a.name).localeCompare(order(b.name)));
}
