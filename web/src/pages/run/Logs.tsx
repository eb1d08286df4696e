// The output of a run's processes: one file, followed while the attempt runs, and the search.
import { useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useState, type FormEvent, type ReactNode } from "react";
import { logDownload, useLogFiles, useRun } from "../../api/queries";
import type { LogMatch, RunLog } from "../../api/types";
import { bytes } from "../../format";
import { LOG_KINDS, placeOfLog } from "../../logs";
import { Empty, Loaded } from "../../parts/basics";
import { LogSearch, useLogSearch } from "./LogSearch";
import { Log } from "./LogView";

/** Jumps to the first error of a file. */
function FirstError({ run, file, show }: {
  run: string;
  file: RunLog;
  show: (at: number) => void;
}) {
  const { found, search, stop } = useLogSearch(run);
  const find = async () => {
    const all = await search("errors", { errors: "true", file: file.file }, 1);
    const first = all?.matches[0];
    if (first) show(first.offset);
  };
  if (found?.isRunning) {
    return (
      <button type="button" onClick={stop}>
        Stop: searched {bytes(found.searched)} of {bytes(file.bytes)}
      </button>
    );
  }
  return (
    <>
      <button type="button" onClick={() => void find()}>First error</button>
      <span role="status" className="muted">
        {found?.error ? "The server did not search." : found?.matches.length === 0
          ? "No error found" : ""}
      </span>
    </>
  );
}

// A browser takes seconds to lay out a list of thousands of files.
const LISTED_MAX = 500;

/** Chooses a rank by its number, where the list has only the files of one node. */
function RankField({ files, open }: { files: RunLog[]; open: (file: string) => void }) {
  const [rank, setRank] = useState("");
  const last = Math.max(...files.map((one) => one.rank ?? 0));
  const submit = (event: FormEvent) => {
    event.preventDefault();
    const found = usual(files.filter((one) => one.rank === Number(rank)));
    if (found) open(found.file);
  };
  return (
    <form className="toolbar" onSubmit={submit}>
      <label>
        Rank
        <input type="number" required min={0} max={last} value={rank}
          onChange={(event) => setRank(event.target.value)} />
      </label>
      <button type="submit">Show rank</button>
    </form>
  );
}

interface FilesProps {
  run: string;
  files: RunLog[];
  /** Whether the files of another attempt are still shown. */
  isOld: boolean;
  leading: ReactNode;
}

/** By default, the first rank's file of the newest launch; else what there is. */
function usual(files: RunLog[]): RunLog | undefined {
  const ranks = files.filter((one) => one.kind === "rank");
  const newest = Math.max(...ranks.map((one) => one.launch ?? 0));
  return ranks.find((one) => one.launch === newest && one.bytes > 0)
    ?? files.find((one) => one.bytes > 0) ?? files[0];
}

function Files({ run, files, isOld, leading }: FilesProps) {
  const { file: chosen, at } = useSearch({ from: "/runs/$run/logs" });
  const navigate = useNavigate({ from: "/runs/$run/logs" });
  const file = files.find((one) => one.file === chosen) ?? usual(files);
  if (!file) {
    return (
      <>
        <div className="toolbar">{leading}</div>
        <Empty title="No process of this attempt has written output" />
      </>
    );
  }
  const show = (place?: number) =>
    void navigate({ search: (old) => ({ ...old, file: file.file, at: place }) });
  const choose = (name: string) =>
    void navigate({ search: (old) => ({ ...old, file: name, at: undefined }) });
  const isLong = files.length > LISTED_MAX;
  const listed = isLong
    ? files.filter((one) => one.node === null || one.node === file.node) : files;
  const open = (match: LogMatch) => void navigate({ search: {
    attempt: match.attempt === null ? undefined : String(match.attempt),
    file: match.file,
    at: match.offset,
  } });
  return (
    <>
      <LogSearch run={run} file={file} open={open} />
      <div className="toolbar">
        {leading}
        <label>
          File
          <select value={file.file} onChange={(event) => choose(event.target.value)}>
            {LOG_KINDS.map((kind) => {
              const some = listed.filter((one) => one.kind === kind);
              return some.length === 0 ? null : (
                <optgroup key={kind} label={kind}>
                  {some.map((one) => (
                    <option key={one.file} value={one.file}>
                      {placeOfLog(one)} · {bytes(one.bytes)}
                    </option>
                  ))}
                </optgroup>
              );
            })}
          </select>
        </label>
        {isLong ? <RankField files={files} open={choose} /> : null}
        <FirstError key={file.file} run={run} file={file} show={show} />
        <a href={logDownload(run, file.file)} download>Download</a>
      </div>
      {isOld ? <p className="loading" role="status">Loading…</p> : (
        <Log key={`${run}/${file.file}/${at ?? ""}`} run={run} file={file} at={at}
          show={show} />
      )}
    </>
  );
}

export function Logs() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const { attempt } = useSearch({ from: "/runs/$run/logs" });
  const navigate = useNavigate({ from: "/runs/$run/logs" });
  const attempts = useRun(name).data?.attempts ?? [];
  const query = useLogFiles(name, attempt);
  const leading = attempts.length === 0 ? null : (
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
      {(files) => attempts.length === 0 && files.length === 0 ? (
        <Empty title="No attempt yet"><p>There is no output yet.</p></Empty>
      ) : (
        <Files run={name} files={files} isOld={query.isPlaceholderData} leading={leading} />
      )}
    </Loaded>
  );
}
