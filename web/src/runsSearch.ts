// What the address of the list of runs may have: filters and the order.

/** Text of the address. The router reads what looks like a number or a truth value as one. */
export const text = (value: unknown): string | undefined =>
  typeof value === "number" || typeof value === "boolean" ? String(value)
    : typeof value === "string" && value !== "" ? value : undefined;

/** A value of the address. What would be written in another way is text, such as "1e5". */
export function readValue(given: string): unknown {
  const value: unknown = JSON.parse(given);
  return value === null || (typeof value === "number" && String(value) !== given) ? given : value;
}

export interface RunsSearch {
  search?: string;
  state?: string;
  user?: string;
  cause?: string;
  partition?: string;
  account?: string;
  tag?: string;
  /** A word of `TIMES` for the time since which runs were submitted. */
  since?: string;
  /** Only runs that need attention. */
  attention?: boolean;
  focus?: string;
  /** A column's id, after a minus sign if the largest value comes first. */
  sort?: string;
  /** The status with which the server refused a token in the address. */
  refused?: number;
}

export const readRunsSearch = (given: Record<string, unknown>): RunsSearch => ({
  search: text(given.search),
  state: text(given.state),
  user: text(given.user),
  cause: text(given.cause),
  partition: text(given.partition),
  account: text(given.account),
  tag: text(given.tag),
  since: text(given.since),
  attention: given.attention === true ? true : undefined,
  focus: text(given.focus),
  sort: text(given.sort),
  refused: typeof given.refused === "number" ? given.refused : undefined,
});
