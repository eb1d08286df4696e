// Why a run failed: the first cause, the errors of all processes in order, stacks, differences.
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useErrors } from "../../api/queries";
import type { ErrorEntry, LaunchDifference, LaunchName, Run, RunErrors } from "../../api/types";
import { count, exact, span, tenths, when } from "../../format";
import { Empty, Facts, Loaded, State, Time } from "../../parts/basics";
import { plain } from "../../states";
import { Stacks } from "./Stacks";

const launchName = ({ attempt, number }: LaunchName): string =>
  `attempt ${attempt}${number === null ? "" : `, launch ${number}`}`;

/** The time of day with its tenths, because errors follow each other within a second. */
function Moment({ at, until }: { at: string | null; until: string | null }) {
  const [then, last] = [when(at), when(until)];
  if (then === null) return <>time unknown</>;
  return (
    <>
      <time dateTime={at ?? undefined} title={exact(then)}>{tenths(then)}</time>
      {last === null ? "" : `, for ${span((last - then) / 1000)}`}
    </>
  );
}

/** A traceback, which can be scrolled by keyboard. */
function Traceback({ text, label }: { text: string; label: string }) {
  return <pre className="log short" tabIndex={0} role="region" aria-label={label}>{text}</pre>;
}

function LogLink({ run, entry }: { run: string; entry: ErrorEntry }) {
  if (!entry.file) return null;
  return (
    <Link to="/runs/$run/logs" params={{ run }}
      search={{ attempt: String(entry.attempt), file: entry.file }}>
      Log
    </Link>
  );
}

/** The first cause: which rank, where, how it ended, and its traceback. */
function First({ run, entry }: { run: string; entry: ErrorEntry }) {
  return (
    <section className="section">
      <h2>Why it failed</h2>
      <p className="problem breaks">{entry.text}</p>
      <Facts
        facts={[
          [entry.ranks_count > 1 ? "Ranks" : "Rank", entry.ranks],
          [entry.hosts.length > 1 ? "Hosts" : "Host", entry.hosts.join(", ")],
          ["Signal", entry.signal],
          ["Exit status", entry.exit_code],
          ["Launch", launchName({ attempt: entry.attempt, number: entry.launch })],
          ["When", entry.at ? <Time at={entry.at} /> : null],
          ["Output", entry.file ? <LogLink run={run} entry={entry} /> : null],
        ]}
      />
      {entry.traceback ? (
        <Traceback text={entry.traceback} label="Traceback of the first cause" />
      ) : null}
    </section>
  );
}

function Entry({ run, entry, isShown }: { run: string; entry: ErrorEntry; isShown: boolean }) {
  return (
    <li className={entry.is_first ? "is-first" : entry.is_secondary ? "is-secondary" : undefined}>
      <div className="breaks">
        {entry.is_first ? <State state="failed">first cause</State> : null}{" "}
        {entry.text}
      </div>
      <div className="muted">
        {plain(entry.source)}
        {entry.source === "journal" ? `: ${plain(entry.kind)}` : ""}
        {" · "}<Moment at={entry.at} until={entry.until} />
        {entry.clock ? ` by the clock of ${entry.clock}` : ""}
        {entry.file ? <> · <LogLink run={run} entry={entry} /></> : null}
      </div>
      {entry.traceback && !isShown ? (
        <details>
          <summary>Traceback</summary>
          <Traceback text={entry.traceback} label={`Traceback of ${entry.text.slice(0, 80)}`} />
        </details>
      ) : null}
    </li>
  );
}

interface Launched {
  launch: number | null;
  entries: ErrorEntry[];
}

/** The entries by launch, in their order. */
function byLaunch(entries: ErrorEntry[]): Launched[] {
  const found: Launched[] = [];
  for (const entry of entries) {
    const last = found.at(-1);
    if (last && last.launch === entry.launch) last.entries.push(entry);
    else found.push({ launch: entry.launch, entries: [entry] });
  }
  return found;
}

/** The errors of all ranks, launches, agents and torchrun, in the order of causes. */
function Order({ errors }: { errors: RunErrors }) {
  const shown = errors.entries.findLast((one) => one.is_first);
  return (
    <section className="section">
      <h2>Errors in order</h2>
      {byLaunch(errors.entries).map(({ launch, entries }, index) => (
        <div key={`${launch}${index}`}>
          <h3>
            {launch === null ? `Attempt ${errors.attempt}` : `Launch ${launch}`}
            {" · "}<Time at={entries.find((one) => one.at)?.at} />
          </h3>
          <ol className="errors">
            {entries.map((entry, place) => (
              <Entry key={place} run={errors.run} entry={entry} isShown={entry === shown} />
            ))}
          </ol>
        </div>
      ))}
      {errors.left_out > 0 ? <p>{count(errors.left_out)} more errors are not listed.</p> : null}
      {errors.unread > 0 ? (
        <p>The files of {count(errors.unread)} more processes were not read, to save time.</p>
      ) : null}
      <p className="muted">{errors.order_note}</p>
    </section>
  );
}

/** What differs from the last launch that worked. */
function Difference({ of }: { of: LaunchDifference }) {
  return (
    <section className="section">
      <h2>What changed since the last launch that worked</h2>
      <p className="muted">
        {of.worked === null
          ? `No launch before ${launchName(of.failed)} reached a new step or saved one.`
          : `The last launch that worked before ${launchName(of.failed)} is `
            + `${launchName(of.worked)}.`}
        {` Of the failed launch: ${of.reached}.`}
      </p>
      {of.worked && of.facts.length === 0 ? <p>Nothing that is recorded differs.</p> : null}
      {of.facts.length > 0 ? (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="What changed">
          <table className="facts-table">
            <thead>
              <tr>
                <th scope="col">Fact</th>
                <th scope="col">It worked with</th>
                <th scope="col">It failed with</th>
              </tr>
            </thead>
            <tbody>
              {of.facts.map((one) => (
                <tr key={one.name}>
                  <td className="breaks">{one.name}</td>
                  <td className="breaks">{one.before ?? "–"}</td>
                  <td className="breaks">{one.now ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
      {of.left_out > 0 ? <p>{count(of.left_out)} more facts differ.</p> : null}
    </section>
  );
}

/** Which attempt is shown, and the choice among those with errors. */
function Attempts({ errors, choose }: { errors: RunErrors; choose: (attempt: number) => void }) {
  const { attempt, attempts } = errors;
  if (attempt === null) return null;
  const isListed = attempts.some((one) => one.number === attempt);
  return (
    <div className="toolbar">
      <label>
        Attempt{" "}
        <select value={attempt} onChange={(event) => choose(+event.target.value)}>
          {isListed ? null : <option value={attempt}>{attempt}: nothing crashed or hung</option>}
          {attempts.toReversed().map((one) => (
            <option key={one.number} value={one.number}>
              {one.number}: {plain(one.state)}
              {one.launches.length > 0 ? `, launches that failed: ${one.launches.join(", ")}` : ""}
            </option>
          ))}
        </select>
      </label>
      {attempts.at(-1)?.number === attempt
        ? <span className="muted">the newest attempt with errors</span> : null}
    </div>
  );
}

export function Errors() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const { attempt } = useSearch({ from: "/runs/$run/errors" });
  const navigate = useNavigate({ from: "/runs/$run/errors" });
  const query = useErrors(name, attempt);
  return (
    <Loaded query={query}>
      {(errors) => errors.attempt === null ? (
        <Empty title="No errors">
          <p>No launch of this run has crashed or hung, and no attempt has failed.</p>
        </Empty>
      ) : (
        <>
          <Attempts errors={errors}
            choose={(chosen) => void navigate({ search: { attempt: String(chosen) } })} />
          {errors.entries.length === 0 && errors.stacks.length === 0 ? (
            <Empty title="No errors">
              <p>Nothing is recorded of attempt {errors.attempt} that failed.</p>
            </Empty>
          ) : null}
          {errors.first ? <First run={errors.run} entry={errors.first} /> : null}
          {errors.entries.length > 0 ? <Order errors={errors} /> : null}
          {errors.stacks.length > 0 ? <Stacks dumps={errors.stacks} /> : null}
          {errors.difference ? <Difference of={errors.difference} /> : null}
        </>
      )}
    </Loaded>
  );
}

const FAILED = new Set(["failed", "hung", "node_failed", "lost"]);

/** Whether the newest attempt of a run has failed, or one of its launches. */
const hasFailed = (run: Run): boolean => {
  const last = run.attempts.at(-1);
  if (!last) return false;
  return FAILED.has(last.state) || run.crashes.some((one) => one.attempt === last.number);
};

function FirstCause({ run }: { run: Run }) {
  const first = useErrors(run.run, undefined).data?.first;
  if (!first) return null;
  const isPast = run.state === "running";
  return (
    <p className={isPast ? "problem past breaks" : "problem breaks"}>
      <strong>{isPast ? "The last failure:" : "Why it failed:"}</strong> {first.text}{" "}
      <Link to="/runs/$run/errors" params={{ run: run.run }} search={{}} className="nowrap">
        All errors
      </Link>
    </p>
  );
}

/** The first cause of the last failure, with a link to all errors; nothing if none has failed. */
export function WhyItFailed({ run }: { run: Run }) {
  return hasFailed(run) ? <FirstCause run={run} /> : null;
}
