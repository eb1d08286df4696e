// Readable journal lines: their kinds, and their facts in one line. Pure functions.
import { bytes, count, exact, figure, span } from "./format";
import { plain } from "./states";

/** All kinds of journal lines, in the order of `contracts.journal.EventKind`. */
export const KINDS = [
  "supervised", "attempt_reserved", "attempt_submitted", "attempt_state", "attempt_ended",
  "successor_submitted", "successor_adopted", "successor_withdrawn",
  "decision", "operator_request", "order_state", "run_ended", "pinned", "unpinned",
  "checkpoint_deleted", "forked", "exported", "imported", "rolled_back", "numerics",
  "claimed", "launch_started", "launch_ended", "signal", "notice", "stop_agreed",
  "stop_failed", "loading", "resumed", "staged", "committed", "save_failed", "mirrored",
  "mirror_failed", "fetched", "verified", "node_lost", "tracked", "goodput", "hang_suspected",
  "hang_cleared", "hang_confirmed", "straggler", "node_silent", "node_slow", "link_slow",
  "slowdown_tested", "protection", "node_unhealthy", "limit_passed", "alert_acknowledged",
  "metric_missing", "metric", "annotated", "consumer", "audit", "note",
] as const;

/** All kinds but notes, which are details for looking into one attempt and crowd the others. */
export const WITHOUT_NOTES: readonly string[] = KINDS.filter((kind) => kind !== "note");

const WORDS_MAX = 280;
const DIGEST = /^[0-9a-f]{32,}$/;
const DIGEST_SHOWN = 12;
const SECONDS = /(?<!_per)_s$|^seconds$/;
const TIMES = /(^|_)(at|until|deadline|time)$/;
// Times are Unix seconds. Smaller numbers under such a name are durations or counts.
const TIME_MIN = 1e9;
// Numbers that are identifiers.
const NAMES = /(^|_)(pid|id|port|job|uid|seed)$/;

/** The text of a fact. Digests are shortened, and nested values are JSON. */
export function factOf(key: string, value: unknown): string {
  if (Array.isArray(value) && value.every((one) => typeof one === "string")) {
    return value.join("; ");
  }
  if (typeof value === "number") {
    if (TIMES.test(key) && value >= TIME_MIN) return exact(value * 1000);
    if (NAMES.test(key)) return String(value);
    if (key === "bytes" || key.endsWith("_bytes")) return bytes(value);
    if (SECONDS.test(key)) return span(value);
    return Number.isInteger(value) ? count(value) : figure(value);
  }
  if (typeof value !== "string") return JSON.stringify(value);
  return DIGEST.test(value) ? `${value.slice(0, DIGEST_SHOWN)}…` : value;
}

const hasValue = (value: unknown): boolean =>
  value !== null && value !== "" && !(Array.isArray(value) && value[0] === undefined);

/** The facts of a journal line, without the attempt, which has its own column. */
export function factsOf(data: Record<string, unknown>): string {
  const facts = Object.entries(data)
    .filter(([key, value]) => key !== "attempt" && hasValue(value))
    .map(([key, value]) => `${plain(key.replace(SECONDS, ""))} ${factOf(key, value)}`.trim());
  const text = facts.join(" · ");
  return text.length > WORDS_MAX ? `${text.slice(0, WORDS_MAX)}…` : text;
}
