// The list of all runs.
import { useNavigate, useSearch, Link } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useCallback, useMemo } from "react";
import { useRuns, type Sort } from "../api/queries";
import { useMayAct } from "../api/session";
import type { RunRow, UnreadableRun } from "../api/types";
import { lazyView } from "../lazy";
import { count, figure, money, percent, when } from "../format";
import { Attention, Problems } from "../parts/Attention";
import { GoodputBar, Progress, Spark } from "../parts/bars";
import { Copy, Empty, Loaded, State, Time, useTitle } from "../parts/basics";
import { useNarrow } from "../narrow";
import { filterOf, isFiltered, RunFilters } from "../parts/RunFilters";
import { SELECT, SelectionProvider, useSelection } from "../parts/Selection";
import { Table } from "../parts/Table";
import { RunTags } from "../parts/Tags";
import { viewOf } from "../savedViews";
import { plain } from "../states";
import { stepOf, timeLeft } from "../progress";

/** The state by the index, and what the server found on disk that contradicts it. */
function States({ run }: { run: RunRow }) {
  return <><State state={run.state} /><Problems uid={run.uid} /></>;
}

function Name({ run }: { run: RunRow }) {
  const given = useSearch({ from: "/" });
  const isNarrow = useNarrow();
  const why = run.reason ?? (run.cause ? plain(run.cause) : "");
  return (
    <>
      <Link to="/runs/$run" params={{ run: run.run }} className="run-name">
        <strong>{run.run}</strong>
      </Link>
      {isNarrow ? <div><States run={run} /></div> : null}
      <div className="second clip" title={why}>
        {why || `by ${run.created_by}${run.partition ? ` · partition ${run.partition}` : ""}`}
      </div>
      <div className="second medium-only">
        {run.world_size ? `${count(run.world_size)} rank${run.world_size === 1 ? "" : "s"} · ` : ""}
        {count(run.attempts)} attempt{run.attempts === 1 ? "" : "s"}
        {run.goodput && run.goodput.ettr > 0 ? ` · goodput ${percent(run.goodput.ettr)}` : ""}
        {run.committed_at ? (
          <span className="narrow-only"> · checkpoint <Time at={run.committed_at} /></span>
        ) : null}
      </div>
      <RunTags tags={run.tags} within={viewOf(given)} />
    </>
  );
}

const COLUMNS: ColumnDef<RunRow, unknown>[] = [
  { id: "state", header: "State", accessorKey: "state",
    cell: ({ row: { original } }) => <States run={original} /> },
  { id: "run", header: "Run", accessorKey: "run",
    cell: ({ row: { original } }) => <Name run={original} /> },
  { id: "step", header: "Progress", accessorKey: "step",
    cell: ({ row: { original: run } }) => (
      <Progress step={stepOf(run)} total={run.steps_total} eta={timeLeft(run)} />
    ) },
  { id: "goodput", header: "Goodput", meta: { broad: true },
    accessorFn: (run) => run.goodput?.ettr ?? -1,
    cell: ({ row: { original: run } }) => run.goodput && run.goodput.ettr > 0 ? (
      <div className="beside">
        <GoodputBar parts={run.goodput} />
        <span>{percent(run.goodput.ettr)}</span>
      </div>
    ) : <span className="muted">–</span> },
  { id: "loss", header: "Loss", meta: { roomy: true }, enableSorting: false,
    cell: ({ row: { original: run } }) => (
      <Spark values={run.spark ?? []} label={`loss, now ${figure(run.spark?.at(-1))}`} />
    ) },
  { id: "gpus", header: "Ranks", meta: { broad: true, number: true },
    accessorFn: (run) => run.world_size ?? 0,
    cell: ({ row: { original: run } }) => count(run.world_size) },
  { id: "attempts", header: "Attempts", accessorKey: "attempts",
    meta: { roomy: true, number: true } },
  { id: "checkpoint", header: "Last checkpoint", meta: { number: true, wide: true },
    accessorFn: (run) => when(run.committed_at) ?? 0,
    cell: ({ row: { original: run } }) => <Time at={run.committed_at} /> },
  { id: "cost", header: "Cost", meta: { roomy: true, number: true },
    accessorFn: (run) => run.goodput?.cost ?? -1,
    cell: ({ row: { original: run } }) => money(run.goodput?.cost, run.goodput?.currency) },
  { id: "created", header: "Started", meta: { number: true, roomy: true },
    accessorFn: (run) => when(run.created_at) ?? 0,
    cell: ({ row: { original: run } }) => <Time at={run.created_at} /> },
];

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

const COLUMN_IDS = new Set(COLUMNS.map((one) => one.id));

/** How the server sorts for the address. An unknown column counts as none. */
function orderOf(sort: string | undefined): Sort {
  const column = sort?.replace(/^-/, "");
  if (!sort || !column || !COLUMN_IDS.has(column)) return USUAL;
  return { sort: SORTS[column] ?? column, order: sort.startsWith("-") ? "desc" : "asc" };
}

const Bulk = lazyView(() => import("./Bulk"), "Bulk");
const SELECTABLE = [SELECT, ...COLUMNS];
// On a phone, the state stands below the name.
const NARROW = COLUMNS.filter((one) => one.id !== "state");

/** The list, where an operator can select runs for one order. */
export function Runs() {
  return <SelectionProvider><List /></SelectionProvider>;
}

function List() {
  useTitle("Runs");
  const mayAct = useMayAct();
  const isNarrow = useNarrow();
  const hasSelected = useSelection().selected.size > 0;
  const given = useSearch({ from: "/" });
  const { sort } = given;
  const navigate = useNavigate({ from: "/" });
  const where = filterOf(given);
  const order = orderOf(sort);
  const query = useRuns({ ...where, ...order });
  const sortBy = useCallback(
    (next: string | undefined) => void navigate({ search: (old) => ({ ...old, sort: next }) }),
    [navigate],
  );
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  const open = useCallback(
    (run: RunRow) => void navigate({ to: "/runs/$run", params: { run: run.run } }),
    [navigate],
  );
  return (
    <>
      <div className="head"><h1>Runs</h1></div>
      <Attention />
      <RunFilters where={where} order={order} />
      <Unreadable runs={query.data?.pages[0]?.unreadable ?? []} />
      <Loaded query={{ data: rows, error: query.error }}>
        {(runs) => runs.length === 0 ? <NoRuns filtered={isFiltered(given)} /> : (
          <>
            {hasSelected ? <Bulk /> : null}
            <Table label="Runs" rows={runs}
              columns={isNarrow ? NARROW : mayAct ? SELECTABLE : COLUMNS}
              keyOf={(run) => run.uid} open={open} onSort={sortBy} sort={sort} />
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
