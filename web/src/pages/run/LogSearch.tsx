// The search in a run's logs: the server searches in steps, and each step shows what it found.
import { useRef, useState, type FormEvent } from "react";
import { searchLogs } from "../../api/queries";
import type { LogMatch, RunLog } from "../../api/types";
import { bytes, count } from "../../format";
import { placeOfLog, withoutCodes } from "../../logs";
import { Problem } from "../../parts/basics";

const SHOWN_MAX = 200;

interface Found {
  what: string;
  matches: LogMatch[];
  searched: number;
  files: number;
  next: string | null;
  isRunning: boolean;
  error: unknown;
}

type Query = Record<string, string | number | undefined>;

/** A search that continues until enough lines are found, the logs end or it is stopped. */
export function useLogSearch(run: string) {
  const [found, setFound] = useState<Found | null>(null);
  const turn = useRef(0);
  const search = async (what: string, query: Query, most = SHOWN_MAX, after?: string) => {
    turn.current += 1;
    const mine = turn.current;
    const all: Found = { what, matches: [], searched: 0, files: 0, next: after ?? null,
      isRunning: true, error: null };
    if (after && found) Object.assign(all, { ...found, isRunning: true });
    const until = all.matches.length + most;
    try {
      do {
        setFound({ ...all });
        const limit = Math.min(100, until - all.matches.length);
        const part = await searchLogs(run, { ...query, limit, after: all.next ?? undefined });
        if (mine !== turn.current) return null;
        all.matches = [...all.matches, ...part.matches];
        all.searched += part.searched_bytes;
        all.files += part.searched_files;
        all.next = part.next;
      } while (all.next !== null && all.matches.length < until);
    } catch (error) {
      if (mine !== turn.current) return null;
      all.error = error;
    }
    setFound({ ...all, isRunning: false });
    return all;
  };
  const stop = () => {
    turn.current += 1;
    setFound((old) => old && { ...old, isRunning: false });
  };
  return { found, search, stop };
}

export const SCOPES = ["all attempts", "this attempt", "this file"] as const;

interface Props {
  run: string;
  file: RunLog;
  open: (match: LogMatch) => void;
}

function progress({ matches, searched, files, next, isRunning }: Found): string {
  const lines = `${count(matches.length)} line${matches.length === 1 ? "" : "s"} found`;
  const where = `${bytes(searched)} in ${count(files)} file${files === 1 ? "" : "s"}`;
  const state = isRunning ? "searching" : next === null ? "searched all" : "stopped";
  return `${lines}; ${state}, ${where}.`;
}

export function LogSearch({ run, file, open }: Props) {
  const { found, search, stop } = useLogSearch(run);
  const [text, setText] = useState("");
  const [scope, setScope] = useState<string>(SCOPES[0]);
  const last = useRef<[string, Query]>(["", {}]);
  const where = (): Query => ({
    attempt: scope === "this attempt" ? file.attempt ?? undefined : undefined,
    file: scope === "this file" ? file.file : undefined,
  });
  const begin = (what: string, query: Query) => {
    last.current = [what, query];
    void search(what, query);
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    if (text) begin(`“${text}”`, { text, ...where() });
  };
  return (
    <section aria-label="Search in logs">
      <form className="toolbar" role="search" onSubmit={submit}>
        <label>
          Find
          <input type="search" value={text} maxLength={200}
            onChange={(event) => setText(event.target.value)} />
        </label>
        <label>
          in
          <select value={scope} onChange={(event) => setScope(event.target.value)}>
            {SCOPES.map((one) => <option key={one}>{one}</option>)}
          </select>
        </label>
        <button type="submit" disabled={!text}>Find</button>
        <button type="button" onClick={() => begin("errors", { errors: "true", ...where() })}>
          Find errors
        </button>
      </form>
      {found ? (
        <div className="found">
          {found.error ? <Problem error={found.error} /> : null}
          <p className="muted">
            <span role="status">{found.what}: {progress(found)}</span>{" "}
            {found.isRunning
              ? <button type="button" onClick={stop}>Stop</button>
              : found.next !== null ? (
                <button type="button" onClick={() =>
                  void search(...last.current, SHOWN_MAX, found.next ?? undefined)}>
                  Find more
                </button>
              ) : null}
          </p>
          {found.matches.length > 0 ? (
            <ol className="matches" tabIndex={0} aria-label="Lines found">
              {found.matches.map((one) => (
                <li key={`${one.file}:${one.offset}`}>
                  <button type="button" onClick={() => open(one)}>
                    <span className="muted">
                      {one.attempt === null ? "" : `attempt ${one.attempt} · `}{placeOfLog(one)}
                    </span>
                    <code>{withoutCodes(one.text).trim()}</code>
                  </button>
                </li>
              ))}
            </ol>
          ) : null}
        </div>
      ) : null}
    </section>
  );
}
