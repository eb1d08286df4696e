// The output of a rank, followed while the attempt runs.
import { useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useEffect, useRef, useState, type ReactNode } from "react";
import { askLog, useLogFiles, useRun } from "../../api/queries";
import type { LogFile } from "../../api/types";
import { bytes } from "../../format";
import { Empty, Loaded, Problem } from "../../parts/basics";

const FOLLOW_MS = 1_000;
const KEPT_CHARACTERS = 1_000_000;
const TAIL_BYTES = 128 * 1024;
const AT_END_PX = 40;

const keyOf = (one: LogFile) => `${one.rank}.${one.launch}.${one.stream}`;
const wordsOf = (one: LogFile) =>
  `rank ${one.rank} · launch ${one.launch} · ${one.stream} · ${bytes(one.bytes)}`;

/** The tail of a file, and its new output while the view is open. */
function useFollowed(run: string, file: LogFile): [string, boolean, unknown] {
  const [text, setText] = useState("");
  const [ended, setEnded] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const { attempt, rank, launch, stream } = file;
  useEffect(() => {
    let current = true;
    let timer: number | undefined;
    let offset: number | undefined;
    const ask = async () => {
      try {
        const limit = offset === undefined ? TAIL_BYTES : undefined;
        const part = await askLog(run, rank, { attempt, launch, stream, offset, limit });
        if (!current) return;
        offset = part.next_offset;
        if (part.text) setText((old) => (old + part.text).slice(-KEPT_CHARACTERS));
        setEnded(part.ended);
        setError(null);
        if (part.ended && part.next_offset >= part.bytes) return;
      } catch (reason) {
        if (current) setError(reason);
      }
      if (current) timer = window.setTimeout(() => void ask(), FOLLOW_MS);
    };
    void ask();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [run, attempt, rank, launch, stream]);
  return [text, ended, error];
}

function Log({ run, file }: { run: string; file: LogFile }) {
  const [text, ended, error] = useFollowed(run, file);
  const place = useRef<HTMLPreElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    const element = place.current;
    if (element && follows.current) element.scrollTop = element.scrollHeight;
  }, [text]);
  return (
    <>
      {error ? <Problem error={error} /> : null}
      <pre
        className="log"
        ref={place}
        tabIndex={0}
        role="region"
        aria-label={wordsOf(file)}
        onScroll={({ currentTarget: at }) => {
          follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < AT_END_PX;
        }}
      >
        {text || "Empty"}
      </pre>
      <p className="muted" role="status">
        {ended ? "End of log: the attempt has ended."
          : "Following. Scroll up to stop."}
      </p>
    </>
  );
}

interface FilesProps {
  run: string;
  files: LogFile[];
  chosen?: string;
  leading: ReactNode;
}

function Files({ run, files, chosen, leading }: FilesProps) {
  const navigate = useNavigate({ from: "/runs/$run/logs" });
  // By default, show the first rank of the newest launch.
  const newest = Math.max(...files.map((one) => one.launch));
  const usual = files.find((one) => one.launch === newest && one.bytes > 0) ?? files[0];
  const file = files.find((one) => keyOf(one) === chosen) ?? usual;
  if (!file) {
    return (
      <>
        <div className="toolbar">{leading}</div>
        <Empty title="The ranks of this attempt have written no output">
          <p>The output of the agent and torchrun is in the attempt's folder.</p>
        </Empty>
      </>
    );
  }
  return (
    <>
      <div className="toolbar">
        {leading}
        <label>
          Stream
          <select
            value={keyOf(file)}
            onChange={(event) =>
              void navigate({ search: (old) => ({ ...old, file: event.target.value }) })
            }
          >
            {files.map((one) => (
              <option key={keyOf(one)} value={keyOf(one)}>{wordsOf(one)}</option>
            ))}
          </select>
        </label>
      </div>
      <Log key={`${run}/${file.attempt}/${keyOf(file)}`} run={run} file={file} />
    </>
  );
}

export function Logs() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const { file, attempt } = useSearch({ from: "/runs/$run/logs" });
  const navigate = useNavigate({ from: "/runs/$run/logs" });
  const attempts = useRun(name).data?.attempts ?? [];
  const query = useLogFiles(name, attempt);
  if (attempts.length === 0) {
    return <Empty title="No attempt yet"><p>There is no output yet.</p></Empty>;
  }
  const leading = (
    <label>
      Attempt
      <select
        value={attempt ?? ""}
        onChange={(event) =>
          void navigate({ search: { attempt: event.target.value || undefined } })
        }
      >
        <option value="">newest</option>
        {attempts.map((one) => <option key={one.number}>{one.number}</option>)}
      </select>
    </label>
  );
  return (
    <Loaded query={query}>
      {(files) => <Files run={name} files={files} chosen={file} leading={leading} />}
    </Loaded>
  );
}
