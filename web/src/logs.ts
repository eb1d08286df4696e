// The text of a log as the page shows it: parts in order, without terminal codes. Pure functions.
import { bytes } from "./format";
import type { LogPlace, RunLog } from "./api/types";

/** The processes that write logs, in the order in which the page lists them. */
export const LOG_KINDS = ["rank", "torchrun", "agent", "flusher", "supervisor"] as const;

/** The words for a log file, without its attempt: "rank 3 · launch 1 · stderr". */
export function placeOfLog({ kind, rank, node, launch, stream, file }: LogPlace): string {
  // A batch script may have written several files with the output of an agent.
  const own = kind === "agent" ? `agent · ${file.replace(/^.*\//, "")}` : kind;
  const words = [
    kind === "rank" ? `rank ${rank}` : own,
    node !== null && kind !== "rank" ? `node ${node}` : null,
    launch === null ? null : `launch ${launch}`,
    kind === "agent" ? null : stream,
  ];
  return words.filter(Boolean).join(" · ");
}

export const wordsOfLog = (one: RunLog): string => `${placeOfLog(one)} · ${bytes(one.bytes)}`;

export interface LogText {
  /** Where the part begins in the file, in bytes. */
  offset: number;
  text: string;
}

// The escape character starts a code of a terminal: colours, cursor moves, titles. Named, because a
// control character in a pattern is mostly a mistake.
const ESCAPE = "\u001b";
const BELL = "\u0007";
const CODES = new RegExp(
  `${ESCAPE}(?:\\[[0-?]*[ -/]*[@-~]|\\][^${BELL}${ESCAPE}]*(?:${BELL}|${ESCAPE}\\\\)?|[@-Z\\\\^_])`,
  "g",
);

/** The text without the codes of terminals. Of a line that was overwritten, as by a progress bar,
    the last state is kept. */
export function withoutCodes(text: string): string {
  const plain = text.includes(ESCAPE) ? text.replace(CODES, "") : text;
  if (!plain.includes("\r")) return plain;
  return plain.replace(/\r+\n/g, "\n").replace(/[^\n]*\r(?=[^\n])/g, "");
}

/** The parts without the oldest ones, so that about `most` characters are left. */
export function newestParts(parts: LogText[], most: number): LogText[] {
  let left = parts.reduce((sum, one) => sum + one.text.length, 0);
  let first = 0;
  while (first < parts.length - 1 && left - (parts[first]?.text.length ?? 0) >= most) {
    left -= parts[first]?.text.length ?? 0;
    first += 1;
  }
  return parts.slice(first);
}
