// The machines that runs were on, and how often each was to blame when an attempt ended.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useFaults, useNodes } from "../api/queries";
import type { NodeRow } from "../api/types";
import { useCallback } from "react";
import { count, when } from "../format";
import { Empty, Loaded, Time, useTitle } from "../parts/basics";
import { Table } from "../parts/Table";
import { plain } from "../states";

const faults = (row: NodeRow): string =>
  Object.entries(row.faults).map(([cause, n]) => `${plain(cause)} × ${n}`).join(", ");

const COLUMNS: ColumnDef<NodeRow, unknown>[] = [
  { id: "host", header: "Node", accessorKey: "host",
    cell: ({ row: { original: one } }) => (
      <>
        <Link to="/nodes" search={{ host: one.host }}><strong>{one.host}</strong></Link>
        <div className="second narrow-only">{faults(one)}</div>
      </>
    ) },
  { id: "attempts", header: "Attempts", accessorKey: "attempts", meta: { number: true } },
  { id: "failures", header: "Failures", accessorKey: "failures", meta: { number: true },
    cell: ({ row: { original: one } }) => one.failures === 0 ? "none" : count(one.failures) },
  { id: "faults", header: "Of what kind", meta: { wide: true }, accessorFn: faults },
  { id: "failed", header: "Last failure", meta: { number: true },
    accessorFn: (one) => when(one.last_failed_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_failed_at} /> },
  { id: "seen", header: "Last used", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.last_started_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_started_at} /> },
];

function Faults({ host }: { host: string }) {
  const query = useFaults(host);
  return (
    <section className="section">
      <h2>Attempts that ended by the fault of {host}</h2>
      <Loaded query={query}>
        {({ faults: told }) => told.length === 0 ? <p>None so far.</p> : (
          <ul>
            {told.map((one) => (
              <li key={`${one.run}/${one.attempt}`}>
                <Link to="/runs/$run" params={{ run: one.run }}>{one.run}</Link>, attempt{" "}
                {one.attempt}: {plain(one.cause)}, <Time at={one.ended_at} />
              </li>
            ))}
          </ul>
        )}
      </Loaded>
    </section>
  );
}

export function Nodes() {
  useTitle("Nodes");
  const query = useNodes();
  const { host } = useSearch({ from: "/nodes" });
  const navigate = useNavigate();
  const open = useCallback(
    (one: NodeRow) => void navigate({ to: "/nodes", search: { host: one.host } }),
    [navigate],
  );
  return (
    <>
      <div className="head"><h1>Nodes</h1></div>
      <Loaded query={query}>
        {({ items }) => items.length === 0 ? (
          <Empty title="No node has been used yet">
            <p>Every machine that an attempt was on is counted here, with its failures.</p>
          </Empty>
        ) : (
          <>
            <Table label="Nodes" rows={items} columns={COLUMNS} keyOf={(one) => one.host}
              open={open} />
            {host ? <Faults host={host} /> : null}
          </>
        )}
      </Loaded>
    </>
  );
}
