// The text of one log file: its end, followed while it grows, or the lines around a place in it.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { askLog } from "../../api/queries";
import type { RunLog } from "../../api/types";
import { bytes } from "../../format";
import { newestParts, shownLog, wordsOfLog, type LogText, type Shown } from "../../logs";
import { Problem } from "../../parts/basics";

const FOLLOW_MS = 1_000;
const KEPT_CHARACTERS = 1_000_000;
const TAIL_BYTES = 128 * 1024;
const BEFORE_BYTES = 32 * 1024;
const EARLIER_BYTES = 512 * 1024;
// The largest part that the server sends.
const PART_BYTES = 1024 * 1024;
const AT_END_PX = 40;
// With more than this to catch up, the reader may skip it.
const FAR_BEHIND = 4 * 1024 * 1024;

interface Followed {
  parts: LogText[];
  /** The bytes that are written but not shown yet. */
  behind: number;
  size: number;
  ended: boolean;
  error: unknown;
}

const NOTHING: Followed = { parts: [], behind: 0, size: 0, ended: false, error: null };

interface Reader {
  found: Followed;
  addEarlier: () => Promise<void>;
  addLater: () => Promise<void>;
  skip: () => void;
}

/** The end of a file and its new output while the view is open, or with `at`, what is around that
    byte. The functions add earlier or later text, and skip what is not shown yet. */
function useLog(run: string, file: string, at: number | undefined): Reader {
  const [found, setFound] = useState(NOTHING);
  const [restarts, setRestarts] = useState(0);
  const kept = useRef(KEPT_CHARACTERS);
  useEffect(() => {
    let current = true;
    let timer: number | undefined;
    let offset: number | undefined;
    const follow = async () => {
      let isBehind = false;
      try {
        const limit = offset === undefined ? TAIL_BYTES : PART_BYTES;
        const part = await askLog(run, { file, offset, limit });
        if (!current) return;
        const behind = Math.max(0, part.bytes - part.next_offset);
        // An unfinished line is not sent, so only progress counts.
        isBehind = behind > 0 && part.next_offset !== offset;
        offset = part.next_offset;
        setFound(({ parts }) => ({
          parts: part.text
            ? newestParts([...parts, { offset: part.offset, text: part.text }], kept.current)
            : parts,
          behind: isBehind ? behind : 0,
          size: part.bytes,
          ended: part.ended,
          error: null,
        }));
        if (part.ended && part.next_offset >= part.bytes) return;
      } catch (error) {
        if (current) setFound((old) => ({ ...old, error }));
      }
      if (current) timer = window.setTimeout(() => void follow(), isBehind ? 0 : FOLLOW_MS);
    };
    const showAround = async (place: number) => {
      try {
        const [before, after] = await Promise.all([
          place > 0 ? askLog(run, { file, before: place, limit: BEFORE_BYTES }) : null,
          askLog(run, { file, offset: place, limit: TAIL_BYTES }),
        ]);
        if (!current) return;
        const parts = before ? [before, after] : [after];
        setFound({ parts, behind: after.bytes - after.next_offset, size: after.bytes,
          ended: after.ended, error: null });
      } catch (error) {
        if (current) setFound((old) => ({ ...old, error }));
      }
    };
    void (at === undefined ? follow() : showAround(at));
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [run, file, at, restarts]);
  const addEarlier = async () => {
    const before = found.parts[0]?.offset;
    if (!before) return;
    try {
      const part = await askLog(run, { file, before, limit: EARLIER_BYTES });
      kept.current += part.text.length;
      setFound((old) => ({ ...old, parts: [part, ...old.parts], error: null }));
    } catch (error) {
      setFound((old) => ({ ...old, error }));
    }
  };
  const addLater = async () => {
    try {
      const part = await askLog(run, { file, offset: found.size - found.behind,
        limit: EARLIER_BYTES });
      setFound((old) => ({ ...old, parts: [...old.parts, part], size: part.bytes,
        behind: part.bytes - part.next_offset, error: null }));
    } catch (error) {
      setFound((old) => ({ ...old, error }));
    }
  };
  const skip = () => {
    setFound(NOTHING);
    setRestarts((old) => old + 1);
  };
  return { found, addEarlier, addLater, skip };
}

/** How far the view is: at the end of the log, or how much it lags. */
function statusOf(found: Followed): string {
  const { ended, behind, error } = found;
  if (found === NOTHING) return "Loading…";
  if (error) return "Not following: the server did not send the log.";
  if (behind > 0) return `${bytes(behind)} behind, catching up.`;
  return ended ? "End of log: the attempt has ended." : "Following. Scroll up to stop.";
}

interface Text {
  before: Shown;
  line: string;
  after: Shown;
}

const NO_TEXT: Shown = { text: "", colours: [] };

/** The shown text, with the line that was jumped to. */
function textOf(parts: LogText[], at: number | undefined): Text {
  const join = (some: LogText[]) => some.map((one) => one.text).join("");
  if (at === undefined) return { before: shownLog(join(parts)), line: "", after: NO_TEXT };
  const rest = join(parts.filter((one) => one.offset >= at));
  const end = rest.indexOf("\n") < 0 ? rest.length : rest.indexOf("\n");
  return {
    before: shownLog(join(parts.filter((one) => one.offset < at))),
    line: shownLog(rest.slice(0, end)).text,
    after: shownLog(rest.slice(end)),
  };
}

/** The set of the places with a colour of terminals. Older browsers show no colours. */
function highlightOf(colour: number): Highlight | undefined {
  if (typeof Highlight === "undefined") return undefined;
  const name = `terminal-${colour}`;
  const known = CSS.highlights.get(name) ?? new Highlight();
  CSS.highlights.set(name, known);
  return known;
}

/** Text with the colours of terminals. It stays one piece, however many colours it has. */
function Coloured({ shown: { text, colours } }: { shown: Shown }) {
  const place = useRef<HTMLSpanElement>(null);
  useLayoutEffect(() => {
    const node = place.current?.firstChild;
    if (!node) return undefined;
    const ranges = colours.flatMap(([start, end, colour]) => {
      const highlight = highlightOf(colour);
      if (!highlight) return [];
      const range = new StaticRange({
        startContainer: node, startOffset: start, endContainer: node, endOffset: end });
      highlight.add(range);
      return [[highlight, range] as const];
    });
    return () => {
      for (const [highlight, range] of ranges) highlight.delete(range);
    };
  }, [text, colours]);
  return <span ref={place}>{text}</span>;
}

interface LogProps {
  run: string;
  file: RunLog;
  /** The byte to show; without it, the end is followed. */
  at: number | undefined;
  /** Shows another byte, or without one, the end. */
  show: (at?: number) => void;
}

export function Log({ run, file, at, show }: LogProps) {
  const { found, addEarlier, addLater, skip } = useLog(run, file.file, at);
  const { parts, error, behind } = found;
  const { before, line, after } = useMemo(() => textOf(parts, at), [parts, at]);
  const place = useRef<HTMLPreElement>(null);
  const target = useRef<HTMLElement>(null);
  const follows = useRef(true);
  const hasText = parts.length > 0;
  const first = parts[0]?.offset ?? 0;
  useEffect(() => {
    const element = place.current;
    if (at === undefined && element && follows.current) element.scrollTop = element.scrollHeight;
  }, [before, at]);
  useEffect(() => {
    const [element, found] = [place.current, target.current];
    if (at === undefined || !hasText || !element || !found) return;
    element.scrollTop = found.offsetTop - element.offsetTop - element.clientHeight / 3;
  }, [at, hasText]);
  const showEarlier = async () => {
    const element = place.current;
    const below = element ? element.scrollHeight - element.scrollTop : 0;
    follows.current = false;
    await addEarlier();
    // Keep what was read in its place.
    requestAnimationFrame(() => {
      if (element) element.scrollTop = element.scrollHeight - below;
    });
  };
  return (
    <>
      {error ? <Problem error={error} /> : null}
      {first > 0 ? (
        <p>
          <button type="button" onClick={() => void showEarlier()}>Show earlier</button>{" "}
          <button type="button" onClick={() => show(0)}>Show the beginning</button>{" "}
          <span className="muted">{bytes(first)} before this</span>
        </p>
      ) : null}
      <pre
        className="log"
        ref={place}
        tabIndex={0}
        role="region"
        aria-label={wordsOfLog(file)}
        onScroll={({ currentTarget: one }) => {
          follows.current = one.scrollHeight - one.scrollTop - one.clientHeight < AT_END_PX;
        }}
      >
        <Coloured shown={before} />
        {at === undefined ? null : <mark ref={target}>{line}</mark>}
        <Coloured shown={after} />
        {before.text || line || after.text || found === NOTHING || error ? null : "Empty"}
      </pre>
      {at === undefined ? (
        <p className="muted">
          <span role="status">{statusOf(found)}</span>{" "}
          {behind > FAR_BEHIND
            ? <button type="button" onClick={skip}>Skip to the end</button> : null}
        </p>
      ) : (
        <p className="toolbar after">
          {behind > 0 ? (
            <>
              <button type="button" onClick={() => void addLater()}>Show later</button>
              <span className="muted">{bytes(behind)} after this</span>
            </>
          ) : null}
          <button type="button" onClick={() => show()}>Show the end</button>
        </p>
      )}
    </>
  );
}
