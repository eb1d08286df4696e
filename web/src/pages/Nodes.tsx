// The machines that attempts have used, and the failures that each one caused.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import type { ColumnDef } from "@tanstack/react-table";
import { useFaults, useNodes } from "../api/queries";
import type { NodeRow } from "../api/types";
import { useCallback, useEffect, useMemo, useRef } from "react";
import { count, when } from "../format";
import { Empty, Loaded, Time, useTitle } from "../parts/basics";
import { Table } from "../parts/Table";
import { useTableSearch } from "../tableSearch";
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
  { id: "faults", header: "Causes", meta: { wide: true }, accessorFn: faults },
  { id: "failed", header: "Last failure", meta: { number: true },
    accessorFn: (one) => when(one.last_failed_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_failed_at} /> },
  { id: "seen", header: "Last used", meta: { number: true, wide: true },
    accessorFn: (one) => when(one.last_started_at) ?? 0,
    cell: ({ row: { original: one } }) => <Time at={one.last_started_at} /> },
];

function Faults({ host }: { host: string }) {
  const query = useFaults(host);
  const panel = useRef<HTMLElement>(null);
  // In a narrow window, the panel is above the table, far from the selected row.
  useEffect(() => {
    // Newer browsers return a promise, which is not a function that ends an effect.
    void panel.current?.scrollIntoView({ block: "nearest" });
  }, [host]);
  return (
    <aside className="panel" aria-label={`Failures of ${host}`} ref={panel}>
      <div className="section-head">
        <h2>Failures attributed to {host}</h2>
        <Link to="/nodes" search={{}}>Close</Link>
      </div>
      <Loaded query={query}>
        {({ faults: found }) => found.length === 0 ? <p>None so far.</p> : (
          <ul>
            {found.map((one) => (
              <li key={`${one.run}/${one.attempt}`}>
                <Link to="/runs/$run" params={{ run: one.run }}>{one.run}</Link>, attempt{" "}
                {one.attempt}: {plain(one.cause)}, <Time at={one.ended_at} />
              </li>
            ))}
          </ul>
        )}
      </Loaded>
    </aside>
  );
}

export function Nodes() {
  useTitle("Nodes");
  const query = useNodes();
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  const { host } = useSearch({ from: "/nodes" });
  const { sort, onSort } = useTableSearch();
  const navigate = useNavigate();
  const open = useCallback(
    (one: NodeRow) => void navigate({ to: "/nodes", search: { host: one.host, sort } }),
    [navigate, sort],
  );
  return (
    <>
      <div className="head"><h1>Nodes</h1></div>
      <Loaded query={{ data: rows, error: query.error }}>
        {(items) => items.length === 0 ? (
          <Empty title="No nodes yet">
            <p>This page lists every machine that an attempt has used, with its failures.</p>
          </Empty>
        ) : (
          <div className={host ? "split details-first" : undefined}>
            <div>
              <Table label="Nodes" rows={items} columns={COLUMNS} keyOf={(one) => one.host}
                open={open} isWhole={!query.hasNextPage} sort={sort} onSort={onSort} isLocal />
              {query.hasNextPage ? (
                <p className="after"><button type="button" disabled={query.isFetchingNextPage}
                  onClick={() => void query.fetchNextPage()}>Show more</button></p>
              ) : null}
            </div>
            {host ? <Faults host={host} /> : null}
          </div>
        )}
      </Loaded>
    </>
  );
}
