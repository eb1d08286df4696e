// The checkpoints on storage: why they are kept, and what a prune would delete.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { get } from "../api/client";
import { useStorage, useStorageTotals } from "../api/queries";
import { useMayAct } from "../api/session";
import type { Prune, StorageRow, Verdict } from "../api/types";
import { bytes, checkpointWords, count } from "../format";
import { ActionButton } from "../parts/Confirm";
import { Empty, Facts, Loaded, State, useTitle } from "../parts/basics";

function Verdicts({ title, verdicts }: { title: string; verdicts: Verdict[] }) {
  if (verdicts.length === 0) return null;
  return (
    <>
      <h3>{title}</h3>
      <ul>
        {verdicts.map((one) => (
          <li key={one.checkpoint}>
            {checkpointWords(one.checkpoint)} · {bytes(one.bytes)} ·{" "}
            <span className="muted">{one.reason}</span>
          </li>
        ))}
      </ul>
    </>
  );
}

/** The current result of a prune, computed from disk. The index may be older. */
function Plan({ run }: { run: string }) {
  const query = useQuery({
    queryKey: ["run", run, "storage"],
    queryFn: () => get<Prune>(`/runs/${encodeURIComponent(run)}/storage`),
  });
  const mayAct = useMayAct();
  return (
    <Loaded query={query}>
      {(plan) => (
        <div className="panel">
          <Verdicts title={`Prunable: ${bytes(plan.bytes_deleted)}`}
            verdicts={plan.deleted} />
          <Verdicts title={`Kept: ${bytes(plan.bytes_kept)}`} verdicts={plan.kept} />
          {plan.deleted.length > 0 && mayAct ? (
            <ActionButton
              action={{
                word: "Prune",
                title: `Prune ${run}`,
                path: `/runs/${encodeURIComponent(run)}/prune`,
                body: { dry_run: false },
                explanation: (
                  <p>{count(plan.deleted.length)} checkpoints are deleted permanently, for the
                    reasons above. This frees {bytes(plan.bytes_deleted)}.</p>
                ),
              }}
            />
          ) : null}
        </div>
      )}
    </Loaded>
  );
}

function Line({ row }: { row: StorageRow }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <tr>
        <td>
          <Link to="/runs/$run/checkpoints" params={{ run: row.run }} className="run-name">
            {row.run}
          </Link>
          <div className="second wide-only clip" title={row.root}>{row.root}</div>
        </td>
        <td className="wide-only"><State state={row.state} /></td>
        <td className="number wide-only">{count(row.kept)}</td>
        <td className="number">{bytes(row.kept_bytes)}</td>
        <td className="number wide-only">{count(row.damaged)}</td>
        <td className="number wide-only">{count(row.deleted)}</td>
        <td className="number">
          {row.would_prune.length > 0
            ? `${count(row.would_prune.length)} · ${bytes(row.would_prune_bytes)}` : "nothing"}
        </td>
        <td>
          <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}
            aria-label={`${open ? "Hide" : "Details"} of ${row.run}`}>
            {open ? "Hide" : "Details"}
          </button>
        </td>
      </tr>
      {open ? <tr><td colSpan={8}><Plan run={row.run} /></td></tr> : null}
    </>
  );
}

const SORTS: [string, string][] = [
  ["kept_bytes", "size"], ["kept", "checkpoints"], ["damaged", "damaged"], ["deleted", "deleted"],
  ["name", "name"], ["created", "newest"],
];

/** The totals over all runs, also of those that are not loaded below. */
function Totals({ prunable }: { prunable: number | null }) {
  return (
    <Loaded query={useStorageTotals()}>
      {(total) => (
        <Facts
          facts={[
            ["Kept", bytes(total.kept_bytes)],
            ["Checkpoints kept", count(total.kept)],
            ["Damaged", total.damaged > 0 ? count(total.damaged) : null],
            ["Prunable", prunable === null ? null : bytes(prunable)],
            ["Deleted so far", count(total.deleted)],
            ["Runs", count(total.runs)],
          ]}
        />
      )}
    </Loaded>
  );
}

export function Storage() {
  useTitle("Storage");
  const given = useSearch({ from: "/storage" }).sort;
  const sort = SORTS.some(([name]) => name === given) && given ? given : "kept_bytes";
  const navigate = useNavigate({ from: "/storage" });
  const query = useStorage({ sort });
  const rows = query.data?.pages.flatMap((page) => page.items);
  // The prunable size is known for loaded rows only, so a total needs all rows.
  const prunable = rows && !query.hasNextPage
    ? rows.reduce((all, row) => all + row.would_prune_bytes, 0) : null;
  return (
    <>
      <div className="head"><h1>Storage</h1></div>
      <Loaded query={{ data: rows, error: query.error }}>
        {(items) => items.length === 0 ? (
          <Empty title="No checkpoints yet">
            <p>This page shows the checkpoints of all runs and why each one is kept.</p>
          </Empty>
        ) : (
          <>
            <Totals prunable={prunable} />
            <div className="toolbar">
              <label>
                Sort by
                <select value={sort} 
                  onChange={(event) =>
                    void navigate({ search: { sort: event.target.value } })}>
                  {SORTS.map(([name, word]) => <option key={name} value={name}>{word}</option>)}
                </select>
              </label>
            </div>
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Storage by run">
              <table>
                <thead>
                  <tr>
                    <th scope="col">Run</th>
                    <th scope="col" className="wide-only">State</th>
                    <th scope="col" className="number wide-only">Kept</th>
                    <th scope="col" className="number">Size</th>
                    <th scope="col" className="number wide-only">Damaged</th>
                    <th scope="col" className="number wide-only">Deleted</th>
                    <th scope="col" className="number">Prunable</th>
                    <th scope="col"><span className="visually-hidden">Details</span></th>
                  </tr>
                </thead>
                <tbody>{items.map((row) => <Line key={row.uid} row={row} />)}</tbody>
              </table>
            </div>
            {query.hasNextPage ? (
              <p className="after"><button type="button" disabled={query.isFetchingNextPage}
                onClick={() => void query.fetchNextPage()}>Show more</button></p>
            ) : null}
          </>
        )}
      </Loaded>
    </>
  );
}
