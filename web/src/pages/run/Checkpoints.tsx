// The checkpoints of a run: their state, retention and cost.
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useCallback, useMemo } from "react";
import { useCheckpoints } from "../../api/queries";
import type { Checkpoint } from "../../api/types";
import { bytes, count, span, when } from "../../format";
import { Empty, Loaded, Time } from "../../parts/basics";
import { StageState } from "../../parts/Durability";
import { Table } from "../../parts/Table";
import { stageOfCheckpoint } from "../../durability";
import { plain } from "../../states";

const COLUMNS: ColumnDef<Checkpoint, unknown>[] = [
  { id: "step", header: "Step", accessorKey: "step", meta: { number: true },
    cell: ({ row: { original: one } }) => (
      <Link to="/checkpoints/$id" params={{ id: one.id }}>{count(one.step)}</Link>
    ) },
  { id: "state", header: "State", accessorKey: "state",
    cell: ({ row: { original: one } }) => (
      <>
        <StageState stage={stageOfCheckpoint(one)} mirrored={Boolean(one.mirrored_at)} />
        {one.pinned ? <span className="second"> · pinned</span> : null}
        {one.rolled_back ? <div className="second">rolled back</div> : null}
      </>
    ) },
  { id: "reason", header: "Retention", accessorKey: "reason",
    cell: ({ row: { original: one } }) => (
      <>
        {one.reason}
        <div className="second narrow-only">
          {bytes(one.bytes)} · <Time at={one.committed_at} />
        </div>
      </>
    ) },
  { id: "saved_for", header: "Trigger", accessorKey: "saved_for", meta: { wide: true },
    cell: ({ row: { original: one } }) => plain(one.saved_for ?? "") },
  { id: "attempt", header: "Attempt", meta: { number: true, wide: true },
    accessorFn: (one) => one.attempt * 1000 + one.launch,
    cell: ({ row: { original: one } }) => `${one.attempt}.${one.launch}` },
  { id: "world", header: "Ranks", accessorKey: "world_size", meta: { number: true, wide: true } },
  { id: "bytes", header: "Size", accessorKey: "bytes", meta: { number: true, wide: true },
    cell: ({ row: { original: one } }) => bytes(one.bytes) },
  { id: "blocked", header: "Blocked", accessorKey: "blocked_s",
    meta: { number: true, wide: true },
    cell: ({ row: { original: one } }) => span(one.blocked_s) },
  { id: "flush", header: "Flush", accessorKey: "flush_s", meta: { number: true, wide: true },
    cell: ({ row: { original: one } }) => span(one.flush_s) },
  { id: "committed", header: "Committed", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.committed_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.committed_at} /> },
];

export function Checkpoints() {
  const { run } = useParams({ from: "/runs/$run" });
  const query = useCheckpoints(run);
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  const navigate = useNavigate();
  const open = useCallback(
    (one: Checkpoint) => void navigate({ to: "/checkpoints/$id", params: { id: one.id } }),
    [navigate],
  );
  return (
    <Loaded query={{ data: rows, error: query.error }}>
      {(all) => all.length === 0 ? (
        <Empty title="No checkpoints yet">
          <p>A checkpoint appears here when its manifest is durable.</p>
        </Empty>
      ) : (
        <>
          <Table label="Checkpoints" rows={all} columns={COLUMNS} keyOf={(one) => one.id}
            open={open} isWhole={!query.hasNextPage} />
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
