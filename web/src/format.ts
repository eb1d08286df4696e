// Formats for numbers, sizes and times. Pure functions: `now` is an argument.

const NONE = "–";
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SPANS: [number, string][] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

// The server's sentences have these digits, and a page with two kinds of digits is hard to read.
const DIGITS = { numberingSystem: "latn" } as const;

const formats = new Map<string, Intl.NumberFormat>();

/** A number in the reader's own format. */
function inLocale(value: number, options: Intl.NumberFormatOptions): string {
  const key = JSON.stringify(options);
  // Creating a format costs far more than using one.
  const known = formats.get(key) ?? new Intl.NumberFormat(undefined, { ...DIGITS, ...options });
  formats.set(key, known);
  return known.format(value);
}

/** A number with exactly `digits` decimals; a dash for a value that is not a number. */
export function decimal(value: unknown, digits: number): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  return inLocale(value, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A whole number, with its digits grouped as the reader's language does. */
export const count = (value: number | null | undefined): string => decimal(value, 0);

/** A number with four digits, for losses and rates. */
export function figure(value: number | null | undefined): string {
  if (value == null) return NONE;
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e7) return count(value);
  if (size >= 1e6 || size < 1e-3) {
    return inLocale(value, { notation: "scientific", minimumFractionDigits: 2,
      maximumFractionDigits: 2 });
  }
  return inLocale(value, { maximumSignificantDigits: 4 });
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return NONE;
  let rest = value;
  let unit = 0;
  while (rest >= 1024 && unit < BYTES.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${decimal(rest, unit === 0 ? 0 : rest < 10 ? 2 : 1)} ${BYTES[unit]}`;
}

/** The two largest units of a duration in seconds: "2 h 5 min". */
export function span(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0) return `−${span(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${count(Math.max(1, Math.round(seconds * 1000)))} ms`;
  if (seconds < 10) return `${inLocale(seconds, { maximumFractionDigits: 1 })} s`;
  let rest = Math.round(seconds);
  const words: string[] = [];
  for (const [size, unit] of SPANS) {
    const whole = Math.floor(rest / size);
    rest -= whole * size;
    if (whole > 0 || words.length > 0) words.push(`${count(whole)} ${unit}`);
    if (words.length === 2) break;
  }
  return words.filter((word) => !word.startsWith("0 ")).join(" ");
}

/** "3 min ago" or "in 2 h", in the largest unit. */
export function relative(then: number, now: number): string {
  const seconds = (now - then) / 1000;
  const size = Math.abs(seconds);
  if (size < 5) return "just now";
  const [unit, word] = SPANS.find(([unit]) => size >= unit) ?? [1, "s"];
  const text = `${count(Math.floor(size / unit))} ${word}`;
  return seconds >= 0 ? `${text} ago` : `in ${text}`;
}

const dateFormat = (options: Intl.DateTimeFormatOptions) =>
  new Intl.DateTimeFormat(undefined, { ...DIGITS, ...options });
const DATE_AND_TIME = dateFormat({ dateStyle: "medium", timeStyle: "medium" });
const EXACT = dateFormat({ dateStyle: "medium", timeStyle: "long" });
const MINUTES = dateFormat({ timeStyle: "short" });
const SECONDS = dateFormat({ timeStyle: "medium" });
const DAY_AND_TIME = dateFormat(
  { month: "numeric", day: "numeric", hour: "numeric", minute: "numeric" });
const TENTHS = dateFormat(
  { hour: "numeric", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 1 });

const RIGHT_TO_LEFT = /[\u0590-\u08ff\u200f]/;

/** A time in its own direction: in a sentence from left to right, parts of a date from right to
    left would change their places. */
function timeIn(format: Intl.DateTimeFormat, then: number): string {
  const text = format.format(then);
  return RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text;
}

/** Date, time and time zone in the reader's own format. The time is local. */
export const exact = (then: number): string => timeIn(EXACT, then);
/** The same without the time zone. */
export const dateAndTime = (then: number): string => timeIn(DATE_AND_TIME, then);
/** The time of day, for an axis of hours. */
export const timeOfDay = (then: number): string => timeIn(MINUTES, then);
/** The time of day, for an axis that may be of seconds. */
export const secondOfDay = (then: number): string => timeIn(SECONDS, then);
/** The day of the year and the time, for an axis of more than a day. */
export const dayAndTime = (then: number): string => timeIn(DAY_AND_TIME, then);
/** The time of day with its tenths of a second. */
export const tenths = (then: number): string => timeIn(TENTHS, then);

export function percent(ratio: number | null | undefined): string {
  if (ratio == null || !Number.isFinite(ratio)) return NONE;
  return `${decimal(ratio * 100, ratio >= 0.9995 || ratio === 0 ? 0 : 1)} %`;
}

export function money(value: number | null | undefined, currency: string | null | undefined) {
  if (value == null) return NONE;
  return `${decimal(value, 2)} ${currency ?? "USD"}`;
}

/** A readable form of `step-00001000.a0001.l01`. */
export function checkpointWords(id: string): string {
  const found = /step-0*(\d+)\.a0*(\d+)\.l0*(\d+)$/.exec(id);
  if (!found) return id;
  return `step ${count(Number(found[1]))} · attempt ${found[2]}.${found[3]}`;
}

/** The run in a checkpoint's id, which is `<run>:<directory>`. */
export function runOf(id: string): string {
  const at = id.lastIndexOf(":");
  return at < 0 ? id : id.slice(0, at);
}

/** Milliseconds of an ISO time; null if it is missing or invalid. */
export function when(iso: string | null | undefined): number | null {
  const value = iso ? Date.parse(iso) : Number.NaN;
  return Number.isNaN(value) ? null : value;
}

/** Unix seconds as an ISO time. */
export const isoOf = (seconds: number): string => new Date(seconds * 1000).toISOString();

/** The attempt that wrote a checkpoint, from its id or directory name. */
export function attemptOf(id: string): number | null {
  const found = /\.a(\d+)\.l\d+$/.exec(id);
  return found ? Number(found[1]) : null;
}
