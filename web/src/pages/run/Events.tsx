// The journal of a run, newest first: what happened, who said so.
import { useParams } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { useEvents } from "../../api/queries";
import type { Event } from "../../api/types";
import { bytes, count, exact, figure, span } from "../../format";
import { Empty, Loaded, Time } from "../../parts/basics";
import { plain } from "../../states";

const KINDS = [
  "attempt_submitted", "attempt_state", "attempt_ended", "decision", "operator_request",
  "resumed", "staged", "committed", "verified", "mirrored", "mirror_failed", "save_failed",
  "signal", "notice", "stop_agreed",
  "rolled_back", "numerics", "hang_confirmed", "straggler", "node_lost", "node_silent", "pinned",
  "checkpoint_deleted", "exported", "forked", "note",
];
const WORDS_MAX = 280;

const DIGEST = /^[0-9a-f]{32,}$/;
const DIGEST_SHOWN = 12;
const SECONDS = /(?<!_per)_s$|^seconds$/;

/** A fact for people: times as such, digests by their beginning, nested things as JSON. */
function show(key: string, value: unknown): string {
  if (typeof value === "number" && key.endsWith("_at")) return exact(value * 1000);
  if (Array.isArray(value) && value.every((one) => typeof one === "string")) {
    return value.join("; ");
  }
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value === "number") {
    if (key === "bytes" || key.endsWith("_bytes")) return bytes(value);
    if (SECONDS.test(key)) return span(value);
    return Number.isInteger(value) ? count(value) : figure(value);
  }
  const text = String(value);
  return DIGEST.test(text) ? `${text.slice(0, DIGEST_SHOWN)}…` : text;
}

/** The facts of a line in one line; the attempt has a column of its own. */
function words(data: Record<string, unknown>): string {
  const told = Object.entries(data)
    .filter(([key]) => key !== "attempt")
    .filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value[0]))
    .map(([key, value]) => `${plain(key.replace(SECONDS, ""))} ${show(key, value)}`.trim());
  const text = told.join(" · ");
  return text.length > WORDS_MAX ? `${text.slice(0, WORDS_MAX)}…` : text;
}

function Line({ event }: { event: Event }) {
  return (
    <tr>
      <td className="nowrap">
        <Time at={event.time} />
        <div className="narrow-only">{plain(event.kind)}</div>
      </td>
      <td className="nowrap wide-only">{plain(event.kind)}</td>
      <td className="number wide-only">{event.attempt ?? ""}</td>
      <td className="prose breaks">{words(event.data)}</td>
      <td className="wide-only muted nowrap">{event.journal.replace(/^.*\/|\.jsonl$/g, "")}</td>
    </tr>
  );
}

export function Events() {
  const { run } = useParams({ from: "/runs/$run" });
  const [kind, setKind] = useState("");
  const query = useEvents(run, kind);
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  return (
    <>
      <div className="toolbar">
        <label>
          Kind
          <select value={kind} onChange={(event) => setKind(event.target.value)}>
            <option value="">all</option>
            {KINDS.map((one) => <option key={one} value={one}>{plain(one)}</option>)}
          </select>
        </label>
      </div>
      <Loaded query={{ data: rows, error: query.error }}>
        {(events) => events.length === 0 ? <Empty title="No such line in the journals" /> : (
          <div className="table-wrap" tabIndex={0} role="region" aria-label="Events">
            <table>
              <thead>
                <tr>
                  <th scope="col">When</th>
                  <th scope="col" className="wide-only">What</th>
                  <th scope="col" className="number wide-only">Attempt</th>
                  <th scope="col">Facts</th>
                  <th scope="col" className="wide-only">Written by</th>
                </tr>
              </thead>
              <tbody>
                {events.map((one) => (
                  <Line key={`${one.journal}/${one.incarnation}/${one.sequence}`} event={one} />
                ))}
              </tbody>
            </table>
          </div>
        )}
      </Loaded>
      {query.hasNextPage ? (
        <p>
          <button type="button" disabled={query.isFetchingNextPage}
            onClick={() => void query.fetchNextPage()}>Show older ones</button>
        </p>
      ) : null}
    </>
  );
}
