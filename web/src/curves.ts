// What several launches logged as one curve: where a later one went over steps again, its word
// stands. Pure.
import type { Series } from "./api/types";

export interface Curve {
  name: string;
  x: number[];
  y: (number | null)[];
}

/** Distances between ticks: steps are whole numbers, so their labels never round. */
export const STEP_INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
  .flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

const RATE = "steps per second";
// A loss is what most people look for; the rest stands in the order of the alphabet.
const order = (name: string): string =>
  `${name === "loss" ? 0 : name.includes("loss") ? 1 : name === RATE ? 3 : 2}${name}`;

/** One curve for each metric and one for the pace, over all launches in their order. */
export function stitch(series: Series[]): Curve[] {
  const launches = series
    .filter((one) => one.points.length > 0)
    .toSorted((a, b) => a.attempt - b.attempt || a.launch - b.launch);
  const kept = launches.flatMap((one, index) => {
    // Whatever any later launch trained again is not part of the curve.
    const until = Math.min(
      ...launches.slice(index + 1).map((later) => later.points[0]?.step ?? Infinity),
    );
    return one.points.filter((point) => point.step < until);
  });
  const names = new Set(kept.flatMap((point) => Object.keys(point.values)));
  const curves = [...names].map((name): Curve => {
    const told = kept.filter((point) => name in point.values);
    return {
      name,
      x: told.map((point) => point.step),
      y: told.map((point) => point.values[name]?.last ?? null),
    };
  });
  curves.push({
    name: RATE,
    x: kept.map((point) => point.step),
    y: kept.map((point) => point.steps_per_s),
  });
  return curves.toSorted((a, b) => order(a.name).localeCompare(order(b.name)));
}
