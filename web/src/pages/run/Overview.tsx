// The overview of a run: notices, attempts over time, use of time and curves.
import { Link, useParams } from "@tanstack/react-router";
import { useState } from "react";
import { useAttention, useNewestCheckpoints, useRun, useTimeline } from "../../api/queries";
import type { OperatorRequest, Run } from "../../api/types";
import { GoodputBar, PartLegend } from "../../parts/bars";
import { Loaded, Time } from "../../parts/basics";
import { attemptOf, count, decimal, isoOf, money, percent, span } from "../../format";
import { plain } from "../../states";
import { gpus, grouped, isCurrent, noticesOf, unsupervised } from "../../story";
import { Curves } from "./Curves";
import { WhyItFailed } from "./Errors";
import { Attempts, Timeline } from "./Timeline";

const NOTICES_MAX = 10;
const ROWS_MAX = 6;

interface NoticeText {
  text: string;
  at: number;
  attempt: number | null;
  times?: number;
}

function Notice({ notice, tone }: { notice: NoticeText; tone: string }) {
  const { text, at, attempt, times = 1 } = notice;
  return (
    <p className={tone}>
      {text}{" "}
      <span className="muted">
        {times > 1 ? `${count(times)} times, last in ` : ""}
        {attempt === null ? "" : `attempt ${attempt}, `}<Time at={isoOf(at)} />
      </span>
    </p>
  );
}

/** The current notices. Those of earlier attempts are folded. */
function Notices({ run }: { run: Run }) {
  const warning = unsupervised(run);
  const dead = useAttention().data?.find((one) => one.uid === run.uid && one.kind === "silent");
  const saves = run.failed_saves.map((one): NoticeText => ({
    text: `The save of step ${count(one.step)} was not committed: ${one.error}`,
    at: one.at,
    attempt: attemptOf(one.checkpoint),
  }));
  const notices = grouped([...saves, ...noticesOf(run)]).slice(0, NOTICES_MAX);
  const [now, before] = [notices.filter((one) => isCurrent(one, run)),
    notices.filter((one) => !isCurrent(one, run))];
  return (
    <>
      {run.on_disk === false ? (
        <p className="problem">The run's folder does not exist, or its root is not mounted. The page
          shows the data of the index.</p>
      ) : null}
      {warning ? <p className="problem" role="alert">{warning}</p> : null}
      {dead ? (
        <p className="problem" role="alert">{dead.text}. What helps: {dead.action}.</p>
      ) : null}
      {run.unprotected.map((one) => (
        <p className="problem" key={one.text}>
          {one.text}. What helps: {one.action}.{" "}
          <span className="muted"><Time at={isoOf(one.at)} /></span>
        </p>
      ))}
      {now.map((one) => <Notice key={`${one.at}${one.text}`} notice={one} tone="problem" />)}
      {before.length > 0 ? (
        <details className="section">
          <summary>{before.length} earlier notice{before.length === 1 ? "" : "s"}</summary>
          {before.map((one) => (
            <Notice key={`${one.at}${one.text}`} notice={one} tone="problem past" />
          ))}
        </details>
      ) : null}
    </>
  );
}

/** The newest attempts as a timeline and a table; all attempts on request. */
function AttemptsSection({ run }: { run: Run }) {
  const checkpoints = useNewestCheckpoints(run.run);
  const timeline = useTimeline(run.run);
  const [all, setAll] = useState(false);
  const shown = all ? run.attempts : run.attempts.slice(-ROWS_MAX);
  return (
    <section className="section">
      <h2>Attempts</h2>
      <Timeline attempts={shown} segments={timeline.data ?? []}
        checkpoints={checkpoints.data ?? []} />
      <Attempts attempts={shown} run={run} />
      {run.attempts.length > ROWS_MAX ? (
        <p className="after">
          <button type="button" onClick={() => setAll(!all)}>
            {all ? `Show the newest ${ROWS_MAX}` : `Show all ${run.attempts.length} attempts`}
          </button>
        </p>
      ) : null}
    </section>
  );
}

/** The newest orders, and what became of each. */
function Orders({ requests }: { requests: OperatorRequest[] }) {
  return (
    <section className="section">
      <h2>Orders</h2>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Orders">
        <table>
          <thead>
            <tr>
              <th className="number">Order</th>
              <th>What</th>
              <th>State</th>
              <th className="wide-only">Detail</th>
              <th className="number">Given</th>
            </tr>
          </thead>
          <tbody>
            {requests.toReversed().map((one) => (
              <tr key={one.number}>
                <td className="number">{one.number}</td>
                <td>
                  {one.action}{one.gpus === null ? "" : ` at ${gpus(one.gpus)}`}
                  <span className="second"> by {one.by}</span>
                </td>
                <td>
                  {one.state}
                  {one.detail ? <div className="second narrow-only">{one.detail}</div> : null}
                </td>
                <td className="wide-only">{one.detail}</td>
                <td className="number"><Time at={isoOf(one.at)} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** The consumers of checkpoints that are not done yet, and the newest others. */
function Consumers({ consumers }: { consumers: Run["consumers"] }) {
  return (
    <section className="section">
      <h2>Consumers</h2>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Consumers">
        <table>
          <thead>
            <tr>
              <th>Consumer</th>
              <th className="number">Step</th>
              <th>State</th>
              <th className="number wide-only">Tries</th>
              <th className="wide-only">Log</th>
              <th className="number">Since</th>
            </tr>
          </thead>
          <tbody>
            {consumers.toReversed().map((one) => (
              <tr key={`${one.name}${one.checkpoint}`}>
                <td>{one.name}<span className="second"> on {one.event}</span></td>
                <td className="number">
                  <Link to="/checkpoints/$id" params={{ id: one.checkpoint }}>
                    {count(one.step)}
                  </Link>
                </td>
                <td>
                  {plain(one.state)}
                  {one.reason ? <div className="second">{one.reason}</div> : null}
                </td>
                <td className="number wide-only">{one.tries}</td>
                <td className="mono wide-only">{one.log}</td>
                <td className="number"><Time at={one.changed_at} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** What the run's time at each place of its resources cost. */
function Places({ stretches }: { stretches: Run["stretches"] }) {
  const hasPrices = stretches.some((one) => one.cost !== null);
  return (
    <section className="section">
      <h2>Where it ran</h2>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Where it ran">
        <table>
          <thead>
            <tr>
              <th>Place</th>
              <th>Attempts</th>
              <th className="number wide-only">Time</th>
              <th className="number">Goodput</th>
              <th className="number wide-only">GPU hours</th>
              {hasPrices ? <th className="number">Cost</th> : null}
              {hasPrices ? <th className="number wide-only">On demand</th> : null}
            </tr>
          </thead>
          <tbody>
            {stretches.map((one) => (
              <tr key={one.first}>
                <td>{one.name}</td>
                <td>{one.first === one.last ? one.first : `${one.first}–${one.last}`}</td>
                <td className="number wide-only">{span(one.ended_at - one.began_at)}</td>
                <td className="number">{percent(one.ettr)}</td>
                <td className="number wide-only">{decimal(one.gpu_hours, 1)}</td>
                {hasPrices ? <td className="number">{money(one.cost, one.currency)}</td> : null}
                {hasPrices ? (
                  <td className="number wide-only">{money(one.on_demand_cost, one.currency)}</td>
                ) : null}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

export function Overview() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const query = useRun(name);
  return (
    <Loaded query={query}>
      {(run) => (
        <>
          <WhyItFailed run={run} />
          <Notices run={run} />
          <AttemptsSection run={run} />
          {run.requests?.length ? <Orders requests={run.requests.slice(-ROWS_MAX)} /> : null}
          {run.consumers.length > 0 ? <Consumers consumers={run.consumers} /> : null}
          <section className="section">
            <h2>Where the time went</h2>
            <GoodputBar parts={run.goodput ?? {}} />
            <PartLegend parts={run.goodput ?? {}} />
          </section>
          {run.stretches.length > 1 ? <Places stretches={run.stretches} /> : null}
          <section className="section">
            <h2>Curves over all attempts</h2>
            <Curves run={run} />
          </section>
        </>
      )}
    </Loaded>
  );
}
