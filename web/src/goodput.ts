// The goodput of a run as the server sends it, checked. Rows of other versions may lack values.
import type { Goodput } from "./api/types";
import { PARTS } from "./states";

const isNumber = (value: unknown): value is number =>
  typeof value === "number" && Number.isFinite(value);

const NUMBERS = ["total_s", "ettr", "gpu_hours", "preemption_gpu_hours", "steps_lost"] as const;
const MONEY = ["cost", "preemption_cost", "on_demand_cost", "saved"] as const;

/** The goodput with all its numbers; null if it is not an account of a run's time. */
export function readGoodput(given: unknown): Goodput | null {
  if (typeof given !== "object" || given === null) return null;
  const facts = given as Record<string, unknown>;
  const names = [...NUMBERS, ...PARTS.map((part) => `${part}_s`)];
  const isWhole = names.every((name) => facts[name] === undefined || isNumber(facts[name]));
  if (!isWhole || !isNumber(facts.total_s) || !isNumber(facts.ettr)) return null;
  return {
    ...Object.fromEntries(names.map((name) => [name, facts[name] ?? 0])),
    ...Object.fromEntries(MONEY.map((name) => [name, isNumber(facts[name]) ? facts[name] : null])),
    currency: typeof facts.currency === "string" ? facts.currency : null,
  } as Goodput;
}

/** What totals are grouped by, besides the user. */
export const GROUPS = ["partition", "account", "tag"] as const;

export type GroupBy = (typeof GROUPS)[number];

/** What the address of the page of goodput holds. */
export interface GoodputSearch {
  user?: string;
  partition?: string;
  account?: string;
  tag?: string;
  since?: string;
  /** What the totals are grouped by, unless it is the user. */
  by?: GroupBy;
}

export const groupOf = (given: unknown): GroupBy | undefined =>
  GROUPS.find((one) => one === given);
