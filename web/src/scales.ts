// The scales of the curves: smoothing, logarithms, ticks, zoom. Pure functions.
import { TIME, TRAINING } from "./curves";
import { count, figure, span } from "./format";

export type Range = [from: number, to: number];
type Values = (number | null)[];

/** An exponential moving average that begins at the first value. Gaps stay gaps. */
export function smooth(values: Values, weight: number): Values {
  let sum = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = sum * weight + value * (1 - weight);
    share = share * weight + (1 - weight);
    return sum / share;
  });
}

/** Values that a logarithmic axis can show; null for the others. */
export const positive = (values: Values): Values =>
  values.map((value) => (value !== null && value > 0 ? value : null));

const DIGITS = [1, 2, 5];
const LOG_ROOM = 0.05;
const LINEAR_TICKS = 5;
// With more decades, fewer of them have ticks.
const DECADES_MAX = 8;
const DIGITS_DECADES = 3;

const ROUNDING = 1e-6;

/** Whether two limits differ by rounding alone, as those of an average of equal values do. */
export const isFlat = (low: number, high: number): boolean =>
  high - low <= ROUNDING * Math.max(Math.abs(low), Math.abs(high));

/** The limits of a logarithmic axis: a little more than the values have. */
export function logRange(low: number | null, high: number | null): Range {
  if (low === null || high === null || !(low > 0)) return [0.1, 10];
  if (isFlat(low, high)) return [low / 2, low * 2];
  const room = (high / low) ** LOG_ROOM;
  return [low / room, high * room];
}

/** The ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or only the powers if there are
    many, or evenly spaced values within a decade. */
export function logTicks(low: number, high: number): number[] {
  if (!(low > 0) || !(high > low)) return [];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const decades = Math.log10(high / low);
  if (decades < 1) return evenTicks(low, high);
  const every = Math.max(1, Math.floor(decades / DECADES_MAX));
  const digits = decades > DIGITS_DECADES ? [1] : DIGITS;
  const ticks = [];
  for (let power = from; power <= to; power += every) {
    for (const digit of digits) ticks.push(Number(`${digit}e${power}`));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function evenTicks(low: number, high: number): number[] {
  const rough = (high - low) / LINEAR_TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (DIGITS.find((digit) => digit * power >= rough) ?? 10) * power;
  const ticks = [];
  for (let one = Math.ceil(low / step); one * step <= high; one += 1) {
    ticks.push(Number((one * step).toPrecision(12)));
  }
  return ticks;
}

/** Distances between ticks: whole numbers, because steps are. */
export const STEP_INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
  .flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

/** Distances between ticks of sizes, which are shown in KiB, MiB and GiB. */
export const BYTE_INCREMENTS = Array.from({ length: 50 }, (_, power) => 2 ** power);

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;
/** Distances between ticks in seconds. */
export const TIME_INCREMENTS = [
  1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR,
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500].map((days) => days * DAY),
];

const NAMES: Record<string, string> = { [TIME]: "time since submission",
  [TRAINING]: "training time" };

export const isTime = (axis: string): boolean => axis in NAMES;
export const axisWords = (axis: string): string => NAMES[axis] ?? axis.replaceAll("_", " ");

/** The text of a position on an axis. */
export const placeWords = (axis: string, value: number | null | undefined): string =>
  value == null ? "–" : isTime(axis) ? (value === 0 ? "0" : span(value))
    : Number.isInteger(value) ? count(value) : figure(value);

const WHOLE_MIN = 10;

/** The ends of a range; whole numbers if the range is wide. */
export function rangeWords(axis: string, [from, to]: Range): string {
  const ends = [from, to].map((one) =>
    placeWords(axis, to - from > WHOLE_MIN ? Math.round(one) : Number(one.toPrecision(6))));
  return ends.join(" – ");
}

const ZOOM_MAX = 1e6;

/** A range that is `factor` times as wide, around `centre`; null for the whole extent. */
export function zoomed(range: Range, extent: Range, factor: number, centre: number): Range | null {
  const width = extent[1] - extent[0];
  const [before, after] = [centre - range[0], range[1] - centre];
  const next: Range = [centre - before * factor, centre + after * factor];
  if (next[1] - next[0] < width / ZOOM_MAX) return range;
  return within(next, extent);
}

/** The range moved by a share of its width, inside the extent. */
export function panned(range: Range, extent: Range, share: number): Range | null {
  const width = range[1] - range[0];
  const from = Math.min(Math.max(range[0] + share * width, extent[0]), extent[1] - width);
  return within([from, from + width], extent);
}

function within([from, to]: Range, [low, high]: Range): Range | null {
  const next: Range = [Math.max(from, low), Math.min(to, high)];
  return next[0] <= low && next[1] >= high ? null : next;
}

/** The lowest and the highest position of all curves; null if there are no points. */
export function extentOf(curves: { x: number[] }[]): Range | null {
  const ends = curves.flatMap(({ x }) => (x.length ? [x[0] as number, x.at(-1) as number] : []));
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
}
