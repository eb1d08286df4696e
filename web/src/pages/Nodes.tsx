// The machines that runs were on, and how often each was to blame when an attempt ended.
import type { ColumnDef } from "@tanstack/react-table";
import { useNodes } from "../api/queries";
import type { NodeRow } from "../api/types";
import { count, when } from "../format";
import { Empty, Loaded, Time, useTitle } from "../parts/basics";
import { Table } from "../parts/Table";
import { plain } from "../states";

const faults = (row: NodeRow): string =>
  Object.entries(row.faults ?? {}).map(([cause, n]) => `${plain(cause)} × ${n}`).join(", ");

const COLUMNS: ColumnDef<NodeRow, unknown>[] = [
  { id: "host", header: "Node", accessorKey: "host",
    cell: ({ row: { original: one } }) => (
      <>
        <strong>{one.host}</strong>
        <div className="second narrow-only">{faults(one)}</div>
      </>
    ) },
  { id: "attempts", header: "Attempts", accessorKey: "attempts", meta: { number: true } },
  { id: "failures", header: "Failures", accessorKey: "failures", meta: { number: true },
    cell: ({ row: { original: one } }) => one.failures === 0 ? "none" : count(one.failures) },
  { id: "faults", header: "Of what kind", meta: { wide: true }, accessorFn: faults },
  { id: "failed", header: "Last failure", meta: { number: true },
    accessorFn: (one) => when(one.last_failure_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_failure_at} /> },
  { id: "seen", header: "Last used", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.last_seen_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_seen_at} /> },
];

export function Nodes() {
  useTitle("Nodes");
  const query = useNodes();
  return (
    <>
      <div className="head"><h1>Nodes</h1></div>
      <Loaded query={query}>
        {({ items }) => items.length === 0 ? (
          <Empty title="No node has been used yet">
            <p>Every machine that an attempt was on is counted here, with its failures.</p>
          </Empty>
        ) : <Table label="Nodes" rows={items} columns={COLUMNS} keyOf={(one) => one.host} />}
      </Loaded>
    </>
  );
}
