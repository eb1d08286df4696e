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
const TITLE = `\\][^${BELL}${ESCAPE}\n]*(?:${BELL}|${ESCAPE}\\\\)?`;
const CODES = new RegExp(`${ESCAPE}(?:\\[[0-?]*[ -/]*[@-~]|${TITLE}|[@-Z\\\\^_])`, "g");

const COLOUR = new RegExp(`^${ESCAPE}\\[([\\d;]*)m$`);
// What a terminal does not show: the end of a line by CR and LF, and what CR overwrote.
const OVERWRITTEN = /(?<!\r)\r+(?=\n)|(?<=^|\n)[^\n]*\r(?=[^\n\r])/g;

/** A part of a text, [start, end), and the number of its colour: 1 to 6 as terminals count, from
    red to cyan, and 7 for grey. Black and white are the colour of the page's own text. */
export type Span = readonly [start: number, end: number, colour: number];

/** A log as a terminal shows it. */
export interface Shown {
  text: string;
  colours: Span[];
}

/** The colour after a code, such as `1;31`. Finer shades than the usual sixteen are not shown. */
function colourAfter(before: number, code: string): number {
  const numbers = code.split(";").map(Number);
  let colour = before;
  for (let at = 0; at < numbers.length; at += 1) {
    const number = numbers[at] ?? 0;
    const isExact = number === 38 || number === 48;
    if (number === 0 || number === 39 || number === 38) colour = 0;
    if (number >= 30 && number <= 37) colour = (number - 30) % 7;
    if (number >= 90 && number <= 97) colour = number === 90 ? 7 : (number - 90) % 7;
    // The numbers of an exact colour follow.
    if (isExact) at += numbers[at + 1] === 2 ? 4 : 2;
  }
  return colour;
}

/** The text without the codes of terminals, and its colours. Of a line that was overwritten, as by
    a progress bar, the last state is kept. */
export function shownLog(raw: string): Shown {
  const marks: { at: number; colour: number }[] = [];
  let [text, gone] = [raw, 0];
  if (raw.includes(ESCAPE)) {
    text = raw.replace(CODES, (code: string, at: number) => {
      const set = COLOUR.exec(code)?.[1];
      if (set !== undefined) {
        marks.push({ at: at - gone, colour: colourAfter(marks.at(-1)?.colour ?? 0, set) });
      }
      gone += code.length;
      return "";
    });
  }
  const cuts: { at: number; end: number }[] = [];
  if (text.includes("\r")) {
    text = text.replace(OVERWRITTEN, (cut: string, at: number) => {
      cuts.push({ at, end: at + cut.length });
      return "";
    });
  }
  let [next, cutAway] = [0, 0];
  const starts = marks.map(({ at }) => {
    for (let cut = cuts[next]; cut && cut.end <= at; cut = cuts[next]) {
      cutAway += cut.end - cut.at;
      next += 1;
    }
    return Math.min(at, cuts[next]?.at ?? at) - cutAway;
  });
  const colours = marks.flatMap(({ colour }, index): Span[] => {
    const [start, end] = [starts[index] ?? 0, starts[index + 1] ?? text.length];
    return colour > 0 && start < end ? [[start, end, colour]] : [];
  });
  return { text, colours };
}

/** The text of a log as a terminal shows it, without colours. */
export const withoutCodes = (text: string): string => shownLog(text).text;

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
