// The stacks and flight records of ranks that were silent, with equal ones as one.
import type { FlightGroup, StackDump, StackGroup } from "../../api/types";
import { count } from "../../format";
import { State, Time } from "../../parts/basics";

/** "rank 3", or "6 ranks: 0-2,4-6". */
const who = ({ ranks, ranks_count: many }: { ranks: string; ranks_count: number }): string =>
  many === 1 ? `rank ${ranks}` : `${count(many)} ranks: ${ranks}`;

function Group({ group, isOpen }: { group: StackGroup; isOpen: boolean }) {
  const where = group.problem ?? group.frames[0] ?? "no frames";
  return (
    <details open={isOpen}>
      <summary className="breaks">
        {group.is_odd ? <><State state="silent">elsewhere</State>{" "}</> : null}
        <strong>{who(group)}</strong>
        {group.waits ? " waiting for others" : ""} at {where}
      </summary>
      {group.frames.length > 0 ? (
        <pre className="log short" tabIndex={0} role="region" aria-label={`Stack of ${who(group)}`}>
          {group.frames.join("\n")}
        </pre>
      ) : null}
    </details>
  );
}

function Flights({ flights, label }: { flights: FlightGroup[]; label: string }) {
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label={label}>
      <table className="facts-table">
        <thead>
          <tr>
            <th scope="col">Ranks</th>
            <th scope="col">Collective</th>
            <th scope="col">Called at</th>
          </tr>
        </thead>
        <tbody>
          {flights.map((one) => (
            <tr key={`${one.group}${one.ranks}${one.call}`}>
              <td className="breaks">
                {one.is_odd ? <><State state="silent">elsewhere</State>{" "}</> : null}
                {who(one)}
              </td>
              <td className="breaks">
                {one.call} ({one.state})
                <div className="second">{one.group}</div>
              </td>
              <td className="breaks">{one.place || "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const WORDS: Record<string, string> = {
  confirmed: "the launch hung",
  suspected: "a hang was suspected",
  cleared: "the ranks continued",
  unreported: "ranks were examined",
};

function Dump({ dump }: { dump: StackDump }) {
  const isSmall = dump.groups.length <= 3;
  return (
    <>
      <h3>
        {dump.launch === null ? "" : `Launch ${dump.launch} · `}
        {WORDS[dump.state] ?? dump.state}
        {dump.at ? <> · <Time at={dump.at} /></> : null}
      </h3>
      {dump.finding ? <p className="breaks">{dump.finding}</p> : null}
      {dump.groups.map((group) => (
        <Group key={`${group.ranks}${group.frames[0]}`} group={group}
          isOpen={group.is_odd || isSmall} />
      ))}
      {dump.flight_finding ? (
        <p className="breaks">By the flight records, {dump.flight_finding}.</p>
      ) : null}
      {dump.flights.length > 0 ? (
        <Flights flights={dump.flights} label={`Collectives of dump ${dump.number}`} />
      ) : null}
      <p className="muted breaks">
        {dump.unread > 0 ? `${count(dump.unread)} stacks were not read. ` : ""}
        Dumps: {dump.files.join(", ")}
      </p>
    </>
  );
}

/** Which ranks had the same stack in each suspected hang. */
export function Stacks({ dumps }: { dumps: StackDump[] }) {
  return (
    <section className="section">
      <h2>Stacks</h2>
      {dumps.map((dump) => <Dump key={dump.number} dump={dump} />)}
    </section>
  );
}
