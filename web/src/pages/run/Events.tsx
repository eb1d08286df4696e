// The journal of a run, newest first.
import { useParams } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { useEvents } from "../../api/queries";
import type { Event } from "../../api/types";
import { KINDS, WITHOUT_NOTES, factsOf } from "../../events";
import { dateAndTime, when } from "../../format";
import { Empty, Loaded, Time } from "../../parts/basics";
import { plain } from "../../states";

const ALL = "all";

function Line({ event }: { event: Event }) {
  return (
    <tr>
      <td className="nowrap">
        <Time at={event.time} />
        <div className="second">{dateAndTime(when(event.time) ?? 0)}</div>
        <div className="narrow-only">{plain(event.kind)}</div>
      </td>
      <td className="nowrap wide-only">{plain(event.kind)}</td>
      <td className="number wide-only">{event.attempt ?? ""}</td>
      <td className="prose breaks">{factsOf(event.data)}</td>
      <td className="wide-only muted nowrap">{event.journal.replace(/^.*\/|\.jsonl$/g, "")}</td>
    </tr>
  );
}

export function Events() {
  const { run } = useParams({ from: "/runs/$run" });
  const [kind, setKind] = useState("");
  const kinds = kind === "" ? WITHOUT_NOTES : kind === ALL ? [] : [kind];
  const query = useEvents(run, kinds);
  const rows = useMemo(() => query.data?.pages.flatMap((page) => page.items), [query.data]);
  return (
    <>
      <div className="toolbar">
        <label>
          Kind
          <select value={kind} onChange={(event) => setKind(event.target.value)}>
            <option value="">all but notes</option>
            <option value={ALL}>all</option>
            {KINDS.map((one) => <option key={one} value={one}>{plain(one)}</option>)}
          </select>
        </label>
      </div>
      <Loaded query={{ data: rows, error: query.error }}>
        {(events) => events.length === 0 ? <Empty title="No matching events" /> : (
          <div className="table-wrap" tabIndex={0} role="region" aria-label="Events">
            <table>
              <thead>
                <tr>
                  <th scope="col">Time</th>
                  <th scope="col" className="wide-only">Kind</th>
                  <th scope="col" className="number wide-only">Attempt</th>
                  <th scope="col">Details</th>
                  <th scope="col" className="wide-only">Written by</th>
                </tr>
              </thead>
              <tbody>
                {events.map((one) => (
                  <Line key={`${one.journal}/${one.opening}/${one.sequence}`} event={one} />
                ))}
              </tbody>
            </table>
          </div>
        )}
      </Loaded>
      {query.hasNextPage ? (
        <p>
          <button type="button" disabled={query.isFetchingNextPage}
            onClick={() => void query.fetchNextPage()}>Show older</button>
        </p>
      ) : null}
    </>
  );
}
