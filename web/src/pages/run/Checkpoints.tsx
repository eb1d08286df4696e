// The checkpoints of a run: their state, retention and cost.
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useCallback, useMemo } from "react";
import { useCheckpoints } from "../../api/queries";
import type { Checkpoint } from "../../api/types";
import { inOrder } from "../../curves";
import { bytes, count, figure, span, when } from "../../format";
import { Empty, Loaded, Time } from "../../parts/basics";
import { Columns } from "../../parts/Columns";
import { StageState } from "../../parts/Durability";
import { Table } from "../../parts/Table";
import { CheckpointTags } from "../../parts/Tags";
import { stageOfCheckpoint } from "../../durability";
import { plain } from "../../states";
import { useTableSearch } from "../../tableSearch";

// Metrics are shown after the first three columns.
const METRICS_AT = 3;

const COLUMNS: ColumnDef<Checkpoint, unknown>[] = [
  { id: "step", header: "Step", accessorKey: "step", meta: { number: true },
    cell: ({ row: { original: one } }) => (
      <Link to="/checkpoints/$id" params={{ id: one.id }}>{count(one.step)}</Link>
    ) },
  { id: "state", header: "State", accessorKey: "state",
    cell: ({ row: { original: one } }) => (
      <>
        <StageState stage={stageOfCheckpoint(one)} mirrored={Boolean(one.mirrored_at)} />
        {one.is_best ? <span className="second"> · best</span> : null}
        {one.pinned ? <span className="second"> · pinned</span> : null}
        {one.rolled_back ? <div className="second">rolled back</div> : null}
        <CheckpointTags tags={one.tags} />
      </>
    ) },
  { id: "reason", header: "Retention", accessorKey: "reason", meta: { prose: true },
    cell: ({ row: { original: one } }) => (
      <>
        {one.reason}
        <div className="second narrow-only">
          {bytes(one.bytes)} · <Time at={one.committed_at} />
        </div>
      </>
    ) },
  { id: "saved_for", header: "Trigger", accessorKey: "saved_for", meta: { roomy: true },
    cell: ({ row: { original: one } }) => plain(one.saved_for ?? "") },
  { id: "attempt", header: "Attempt", meta: { number: true, roomy: true },
    accessorFn: (one) => one.attempt * 1000 + one.launch,
    cell: ({ row: { original: one } }) => `${one.attempt}.${one.launch}` },
  { id: "world", header: "Ranks", accessorKey: "world_size", meta: { number: true, roomy: true } },
  { id: "bytes", header: "Size", accessorKey: "bytes", meta: { number: true, wide: true },
    cell: ({ row: { original: one } }) => bytes(one.bytes) },
  { id: "blocked", header: "Blocked", accessorKey: "blocked_s",
    meta: { number: true, roomy: true },
    cell: ({ row: { original: one } }) => span(one.blocked_s) },
  { id: "flush", header: "Flush", accessorKey: "flush_s", meta: { number: true, roomy: true },
    cell: ({ row: { original: one } }) => span(one.flush_s) },
  { id: "committed", header: "Committed", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.committed_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.committed_at} /> },
];

const METRICS_MAX = 64;
const METRICS_SHOWN = 3;
const METRIC = "metric ";

/** The names of all metrics of the loaded checkpoints. */
const metricsOf = (rows: Checkpoint[]): string[] =>
  inOrder(new Set(rows.flatMap((one) => Object.keys(one.metrics)))).slice(0, METRICS_MAX);

const metricColumn = (name: string): ColumnDef<Checkpoint, unknown> => ({
  id: METRIC + name, header: plain(name), meta: { number: true, wide: true },
  accessorFn: (one) => one.metrics[name],
  sortUndefined: "last",
  cell: ({ row: { original: one } }) => {
    const value: unknown = one.metrics[name];
    return typeof value === "number" ? figure(value) : typeof value === "string" ? value : "–";
  },
});

/** The table of the loaded checkpoints, with the columns that the address chooses. */
function List({ rows, isWhole }: { rows: Checkpoint[]; isWhole: boolean }) {
  const { sort, onSort, columns, setColumns } = useTableSearch();
  const key = metricsOf(rows).join("\n");
  const all = useMemo(() => [...COLUMNS.slice(0, METRICS_AT),
    ...(key ? key.split("\n").map(metricColumn) : []), ...COLUMNS.slice(METRICS_AT)], [key]);
  const ids = all.map((one) => one.id ?? "").filter((id) => id !== "step");
  const hidden = new Set(ids.filter((id) => id.startsWith(METRIC)).slice(METRICS_SHOWN));
  const usual = ids.filter((id) => !hidden.has(id));
  const shown = columns ? ids.filter((id) => columns.includes(id)) : usual;
  const navigate = useNavigate();
  const open = useCallback(
    (one: Checkpoint) => void navigate({ to: "/checkpoints/$id", params: { id: one.id } }),
    [navigate],
  );
  const word = (id: string) => String(all.find((one) => one.id === id)?.header ?? id);
  return (
    <>
      <Columns all={ids.map((id) => [id, word(id)])} shown={shown} usual={usual}
        set={setColumns} />
      <Table label="Checkpoints" rows={rows} keyOf={(one) => one.id} open={open} isWhole={isWhole}
        columns={all.filter((one) => one.id === "step" || shown.includes(one.id ?? ""))}
        sort={sort} onSort={onSort} isLocal />
    </>
  );
}

export function Checkpoints() {
  const { run } = useParams({ from: "/runs/$run" });
  const query = useCheckpoints(run);
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  return (
    <Loaded query={{ data: rows, error: query.error }}>
      {(all) => all.length === 0 ? (
        <Empty title="No checkpoints yet">
          <p>A checkpoint appears here when its manifest is durable.</p>
        </Empty>
      ) : (
        <>
          <List rows={all} isWhole={!query.hasNextPage} />
          {query.hasNextPage ? (
            <p>
              <button type="button" disabled={query.isFetchingNextPage}
                onClick={() => void query.fetchNextPage()}>Show older</button>
            </p>
          ) : null}
        </>
      )}
    </Loaded>
  );
}
