// The texts of compared facts. Pure functions.
import { bytes, count, exact, figure, percent, span, when } from "../../format";
import { plain } from "../../states";

const SIZES = new Set(["bytes"]);
const SPANS = /(?<!_per)_s$/;
const TIMES = /_at$/;
const TITLES: Record<string, string> = {
  ettr: "goodput", total_s: "total time", training_s: "training time", gpu_hours: "GPU hours",
};

/** The name of a fact. Keys of a spec keep their dots, so that a person finds them there. */
export const titleOf = (name: string): string =>
  TITLES[name] ?? (name.includes(".") ? name : plain(name));

/** The text of a fact, with complete digests. */
export function show(name: string, value: unknown): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") {
    if (SIZES.has(name)) return bytes(value);
    if (name === "ettr") return percent(value);
    if (SPANS.test(name)) return span(value);
    return Number.isInteger(value) ? count(value) : figure(value);
  }
  if (typeof value !== "string") return JSON.stringify(value);
  return TIMES.test(name) ? exact(when(value) ?? 0) : value;
}

export const hasValue = (value: unknown): boolean =>
  value !== null && value !== undefined && value !== "";
