// The runs that wait for GPUs: how long, why, and when Slurm expects them to start.
import { Link } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useQueue } from "../api/queries";
import type { WaitingRun } from "../api/types";
import { count, when } from "../format";
import { Empty, Loaded, Said, State, Time, useTitle } from "../parts/basics";
import { Table } from "../parts/Table";
import { useTableSearch } from "../tableSearch";

const COLUMNS: ColumnDef<WaitingRun, unknown>[] = [
  { id: "run", header: "Run", accessorKey: "run",
    cell: ({ row: { original: one } }) => (
      <>
        <Link to="/runs/$run" params={{ run: one.run }} className="run-name">
          <strong>{one.run}</strong>
        </Link>
        <div className="second">
          <State state={one.state} /> by {one.user}
          {one.job_id ? ` · job ${one.job_id}` : ""}
        </div>
      </>
    ) },
  { id: "reason", header: "Reason", accessorFn: (one) => one.reason ?? "",
    cell: ({ row: { original: one } }) => (
      <div className="breaks">
        {one.reason ?? <span className="muted">no reason is known</span>}
        <div className="second">What helps: <Said text={one.action} />.</div>
      </div>
    ) },
  { id: "gpus", header: "Ranks", meta: { number: true, wide: true },
    accessorFn: (one) => one.gpus ?? 0, cell: ({ row: { original: one } }) => count(one.gpus) },
  { id: "partition", header: "Partition", meta: { wide: true },
    accessorFn: (one) => one.partition ?? "",
    cell: ({ row: { original: one } }) => one.partition ?? <span className="muted">default</span> },
  { id: "since", header: "Waiting since", meta: { number: true },
    accessorFn: (one) => when(one.since) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.since} /> },
  { id: "starts", header: "Expected start", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.starts_at) ?? Number.POSITIVE_INFINITY,
    cell: ({ row: { original: one } }) => one.starts_at
      ? <Time at={one.starts_at} /> : <span className="muted">no forecast</span> },
];

export function Queue() {
  useTitle("Queue");
  const { sort, onSort } = useTableSearch();
  return (
    <>
      <div className="head"><h1>Queue</h1></div>
      <Loaded query={useQueue()}>
        {(found) => found.length === 0 ? (
          <Empty title="No run waits for GPUs">
            <p>This page shows pending jobs and runs between two attempts, with the reasons.</p>
          </Empty>
        ) : (
          <Table label="Queue" rows={found} columns={COLUMNS} keyOf={(one) => one.uid}
            sort={sort} onSort={onSort} isLocal />
        )}
      </Loaded>
    </>
  );
}
