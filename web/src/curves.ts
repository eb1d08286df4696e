// One curve from the values of several launches. For repeated steps, the later launch counts. Pure
// functions.
import type { Point, Series } from "./api/types";

export interface Curve {
  name: string;
  x: number[];
  y: (number | null)[];
}

/** What the horizontal axis counts: steps, seconds, or a metric that only grows. */
export const STEP = "step";
export const TIME = "time";
export const TRAINING = "training";

/** The limits of the axis of a constant, which is in the middle and not at an edge. */
export function aroundConstant(value: number): [number, number] {
  const room = Math.abs(value) * 0.1 || 1;
  return [value - room, value + room];
}

const RATE = "steps per second";
// The name of the rate in the API's tables.
export const RATE_COLUMN = "steps_per_s";
// Losses come first, then the other metrics by name, then the rate.
const order = (name: string): string =>
  `${name === "loss" ? 0 : name.includes("loss") ? 1 : name === RATE ? 3 : 2}${name}`;

export const inOrder = (names: Iterable<string>): string[] =>
  [...names].toSorted((a, b) => order(a).localeCompare(order(b)));

/** The name of a curve in the API. */
export const columnOf = (name: string): string => (name === RATE ? RATE_COLUMN : name);

/** A point of the run's history, with the seconds of training until it. */
interface Moment extends Point {
  training_s: number;
}

/** The seconds between a launch's last point before `step` and `step`, at its own pace. */
function startOf(points: Point[], before: number): number {
  const [first, second] = points;
  if (!first || !second || second.step <= first.step) return 0;
  const pace = (second.time_s - first.time_s) / (second.step - first.step);
  return Math.max(0, pace * Math.max(0, first.step - before));
}

/** The points of all launches in order, without the steps that a later launch repeated. */
export function momentsOf(series: Series[]): Moment[] {
  const launches = series
    .filter((one) => one.points.length > 0)
    .toSorted((a, b) => a.attempt - b.attempt || a.launch - b.launch);
  const starts = launches.map((one) => one.points[0]?.step ?? Infinity);
  let training = 0;
  let step = 0;
  return launches.flatMap((one, index) => {
    const until = Math.min(...starts.slice(index + 1));
    let before: Point | undefined;
    return one.points.filter((point) => point.step < until).map((point) => {
      training += before ? Math.max(0, point.time_s - before.time_s) : startOf(one.points, step);
      before = point;
      step = point.step;
      return { ...point, training_s: training };
    });
  });
}

const MIN_GROWING = 2;

/** The metrics that only grow, such as samples or tokens: each of them can be the axis. */
export function countersOf(series: Series[]): string[] {
  const last = new Map<string, [value: number, points: number]>();
  const refused = new Set<string>();
  for (const { values } of momentsOf(series)) {
    for (const [name, { last: value }] of Object.entries(values)) {
      const [before, points] = last.get(name) ?? [-Infinity, 0];
      if (value === null || value <= before) refused.add(name);
      else last.set(name, [value, points + 1]);
    }
  }
  return [...last].filter(([name, [, points]]) => points > MIN_GROWING && !refused.has(name))
    .map(([name]) => name).toSorted();
}

/** The position of a moment on an axis; `began` is when the run was submitted. */
function placeOf(moment: Moment, axis: string, began: number): number | null {
  if (axis === STEP) return moment.step;
  if (axis === TIME) return moment.time_s - began;
  if (axis === TRAINING) return moment.training_s;
  return moment.values[axis]?.last ?? null;
}

/** The moments whose position on the axis is greater than that of all earlier ones. */
function placed(moments: Moment[], axis: string, began: number): [number, Moment][] {
  let last = -Infinity;
  return moments.flatMap((moment): [number, Moment][] => {
    const x = placeOf(moment, axis, began);
    // The clocks of two hosts may differ, and the library needs ascending positions.
    if (x === null || x <= last) return [];
    last = x;
    return [[x, moment]];
  });
}

/** One curve for each metric and one for the rate, over all launches in order. */
export function stitch(series: Series[], axis = STEP, began = 0): Curve[] {
  const kept = placed(momentsOf(series), axis, began);
  const names = new Set(kept.flatMap(([, point]) => Object.keys(point.values)));
  const curves = [...names].filter((name) => name !== axis).map((name): Curve => {
    const points = kept.filter(([, point]) => name in point.values);
    return {
      name,
      x: points.map(([x]) => x),
      y: points.map(([, point]) => point.values[name]?.last ?? null),
    };
  });
  curves.push({
    name: RATE,
    x: kept.map(([x]) => x),
    y: kept.map(([, point]) => point.steps_per_s),
  });
  return curves.toSorted((a, b) => order(a.name).localeCompare(order(b.name)));
}

/** Where on the axis a run was at `step`: at its first point from there on. */
export function placeOfStep(
  series: Series[], step: number, axis: string, began = 0,
): number | null {
  if (axis === STEP) return step;
  return placed(momentsOf(series), axis, began).find(([, moment]) => moment.step >= step)?.[0]
    ?? null;
}
