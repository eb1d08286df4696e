// The list of all runs.
import { useNavigate, useSearch, Link } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { useRuns, type Sort } from "../api/queries";
import type { RunRow, UnreadableRun } from "../api/types";
import { count, figure, money, percent, when } from "../format";
import { GoodputBar, Progress, Spark } from "../parts/bars";
import { Copy, Empty, Loaded, State, Time, useTitle } from "../parts/basics";
import { Table } from "../parts/Table";
import { PREFIX } from "../prefix";
import { plain } from "../states";
import { stepOf, timeLeft } from "../progress";

const STATES = ["running", "queued", "waiting", "paused", "completed", "failed", "cancelled"];
const TYPING_MS = 250;

function Name({ run }: { run: RunRow }) {
  const why = run.reason ?? (run.cause ? plain(run.cause) : "");
  return (
    <>
      <Link to="/runs/$run" params={{ run: run.run }}><strong>{run.run}</strong></Link>
      <div className="second clip" title={why}>
        {why || `by ${run.created_by}`}
      </div>
      <div className="second narrow-only">
        {run.world_size ? `${run.world_size} ranks · ` : ""}
        {run.attempts} attempt{run.attempts === 1 ? "" : "s"}
        {run.goodput ? ` · goodput ${percent(run.goodput.ettr)}` : ""}
      </div>
    </>
  );
}

const COLUMNS: ColumnDef<RunRow, unknown>[] = [
  { id: "state", header: "State", accessorKey: "state",
    cell: ({ row: { original } }) => <State state={original.state} /> },
  { id: "run", header: "Run", accessorKey: "run",
    cell: ({ row: { original } }) => <Name run={original} /> },
  { id: "step", header: "Progress", accessorKey: "step",
    cell: ({ row: { original: run } }) => (
      <Progress step={stepOf(run)} total={run.steps_total} eta={timeLeft(run)} />
    ) },
  { id: "goodput", header: "Goodput", meta: { wide: true },
    accessorFn: (run) => run.goodput?.ettr ?? -1,
    cell: ({ row: { original: run } }) => run.goodput && run.goodput.ettr > 0 ? (
      <div className="beside">
        <GoodputBar parts={run.goodput} />
        <span>{percent(run.goodput.ettr)}</span>
      </div>
    ) : <span className="muted">–</span> },
  { id: "loss", header: "Loss", meta: { wide: true }, enableSorting: false,
    cell: ({ row: { original: run } }) => (
      <Spark values={run.spark ?? []} label={`loss, now ${figure(run.spark?.at(-1))}`} />
    ) },
  { id: "gpus", header: "Ranks", meta: { wide: true, number: true },
    accessorFn: (run) => run.world_size ?? 0,
    cell: ({ row: { original: run } }) => count(run.world_size) },
  { id: "attempts", header: "Attempts", accessorKey: "attempts",
    meta: { wide: true, number: true } },
  { id: "checkpoint", header: "Last checkpoint", meta: { number: true, wide: true },
    accessorFn: (run) => when(run.committed_at) ?? 0,
    cell: ({ row: { original: run } }) => <Time at={run.committed_at} /> },
  { id: "cost", header: "Cost", meta: { wide: true, number: true },
    accessorFn: (run) => run.goodput?.cost ?? -1,
    cell: ({ row: { original: run } }) => money(run.goodput?.cost, run.goodput?.currency) },
  { id: "created", header: "Started", meta: { number: true, wide: true },
    accessorFn: (run) => when(run.created_at) ?? 0,
    cell: ({ row: { original: run } }) => <Time at={run.created_at} /> },
];

function Search() {
  const { search = "", state = "", focus } = useSearch({ from: "/" });
  const navigate = useNavigate({ from: "/" });
  const box = useRef<HTMLInputElement>(null);
  const timer = useRef<number | undefined>(undefined);
  useEffect(() => {
    if (focus === "search") box.current?.focus();
  }, [focus]);
  // Follow the address, unless the user is typing.
  useEffect(() => {
    if (box.current && timer.current === undefined) box.current.value = search;
  }, [search]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = (words: string) => {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      timer.current = undefined;
      // The user may have left this page meanwhile.
      if (window.location.pathname !== `${PREFIX}/`) return;
      void navigate({ search: (old) => ({ ...old, search: words || undefined }), replace: true });
    }, TYPING_MS);
  };
  return (
    <div className="toolbar" role="search">
      <input
        ref={box}
        type="search"
        aria-label="Search runs by name"
        placeholder="Search by name ( / )"
        defaultValue={search}
        onChange={(event) => type(event.target.value)}
        onKeyDown={(event) => {
          if (event.key !== "Escape") return;
          // Keep the search text, and let the list receive the keys.
          event.preventDefault();
          event.currentTarget.blur();
        }}
      />
      <label>
        State
        <select
          value={state}
          onChange={(event) =>
            void navigate({
              search: (old) => ({ ...old, state: event.target.value || undefined }),
            })
          }
        >
          <option value="">all</option>
          {STATES.map((one) => <option key={one}>{one}</option>)}
        </select>
      </label>
    </div>
  );
}

function NoRuns({ filtered }: { filtered: boolean }) {
  if (filtered) {
    return (
      <Empty title="No matching runs">
        <p><Link to="/">Show all runs</Link></p>
      </Empty>
    );
  }
  return (
    <Empty title="No runs yet">
      <p>A run appears here when it is submitted. To submit one:</p>
      <Copy text="holdfast submit spec.toml" label="command that submits a run" />
      <p className="muted">
        To list the runs of another root, use <code>holdfast reindex ROOT</code>.
      </p>
    </Empty>
  );
}

/** The folders of runs that cannot be read, with the reasons. */
function Unreadable({ runs }: { runs: UnreadableRun[] }) {
  if (runs.length === 0) return null;
  return (
    <details className="problem">
      <summary>{count(runs.length)} run{runs.length === 1 ? "" : "s"} cannot be read</summary>
      <ul>
        {runs.map(({ path, reason }) => <li key={path}><code>{path}</code>: {reason}</li>)}
      </ul>
    </details>
  );
}

// Live runs come first.
const USUAL: Sort = { sort: "live" };
// The server's names for columns with another id.
const SORTS: Record<string, string> = { run: "name" };

export function Runs() {
  useTitle("Runs");
  const { search, state } = useSearch({ from: "/" });
  const navigate = useNavigate();
  const [by, setBy] = useState(USUAL);
  const query = useRuns({ search, state, ...by });
  const sortBy = useCallback((column: string | null, descending: boolean) => setBy(
    column === null ? USUAL
      : { sort: SORTS[column] ?? column, order: descending ? "desc" : "asc" },
  ), []);
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  const open = useCallback(
    (run: RunRow) => void navigate({ to: "/runs/$run", params: { run: run.run } }),
    [navigate],
  );
  return (
    <>
      <div className="head"><h1>Runs</h1></div>
      <Search />
      <Unreadable runs={query.data?.pages[0]?.unreadable ?? []} />
      <Loaded query={{ data: rows, error: query.error }}>
        {(runs) => runs.length === 0 ? <NoRuns filtered={Boolean(search || state)} /> : (
          <>
            <Table label="Runs" rows={runs} columns={COLUMNS} keyOf={(run) => run.uid}
              open={open} onSort={sortBy} />
            {query.hasNextPage ? (
              <p><button type="button" disabled={query.isFetchingNextPage}
                onClick={() => void query.fetchNextPage()}>Show more</button></p>
            ) : null}
          </>
        )}
      </Loaded>
    </>
  );
}
