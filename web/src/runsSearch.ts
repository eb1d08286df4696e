// What the address of the list of runs may have: filters and the order.

export const text = (value: unknown): string | undefined =>
  typeof value === "string" && value !== "" ? value : undefined;

/** Text that may look like a number, which the router then reads as one. */
const word = (value: unknown): string | undefined =>
  typeof value === "number" ? String(value) : text(value);

export interface RunsSearch {
  search?: string;
  state?: string;
  user?: string;
  cause?: string;
  partition?: string;
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
  tag: word(given.tag),
  since: text(given.since),
  attention: given.attention === true ? true : undefined,
  focus: text(given.focus),
  sort: text(given.sort),
  refused: typeof given.refused === "number" ? given.refused : undefined,
});
