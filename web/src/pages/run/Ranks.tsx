// The ranks of a run: step, phase, last activity, and their nodes' heartbeats.
import { useParams } from "@tanstack/react-router";
import { useHeartbeats, useRun } from "../../api/queries";
import { useGpus, useHeatMap } from "../../api/series";
import type { NodeBeat, RankRow, Run } from "../../api/types";
import { bytes, count, span } from "../../format";
import { Empty, Loaded, State, Time } from "../../parts/basics";
import { isLive, plain } from "../../states";
import { RanksOverTime } from "./RanksOverTime";

const SILENT_S = 30;

function Rank({ rank, beatAge }: { rank: RankRow; beatAge: number }) {
  // The rank's silence was measured at the heartbeat, so add the heartbeat's age.
  const age = rank.age_s === null ? null : rank.age_s + Math.max(0, beatAge);
  return (
    <tr>
      <td className="number">{rank.rank}</td>
      <td className="number">{rank.step < 0 ? "–" : count(rank.step)}</td>
      <td>{plain(rank.phase)}</td>
      <td className="number">{age === null ? "—" : `${span(age)} ago`}</td>
      <td className="number wide-only">{span(rank.step_p50_s || rank.step_time_s)}</td>
      <td className="number wide-only">{span(rank.step_p99_s || null)}</td>
      <td className="number wide-only">{span(rank.own_s || null)}</td>
      <td className="number wide-only">{bytes(rank.rss_bytes)}</td>
      <td className="number wide-only">
        {rank.cpu_percent === null ? "–" : `${Math.round(rank.cpu_percent)} %`}
      </td>
    </tr>
  );
}

function Node({ node, live }: { node: NodeBeat; live: boolean }) {
  const silent = live && node.age_s > SILENT_S;
  return (
    <section className="section">
      <div className="section-head">
        <h2>{node.host}</h2>
        <State state={!live ? "completed" : silent ? "silent" : "alive"}>
          {!live ? "ended" : silent ? "silent" : "alive"}
        </State>
        <span className="muted">
          node {node.node} · heartbeat <Time at={node.time} />
          {node.memory_percent === null ? "" : ` · memory ${Math.round(node.memory_percent)} %`}
        </span>
      </div>
      <div className="table-wrap" tabIndex={0} role="region" aria-label={`Ranks on ${node.host}`}>
        <table>
          <thead>
            <tr>
              <th scope="col" className="number">Rank</th>
              <th scope="col" className="number">Step</th>
              <th scope="col">Phase</th>
              <th scope="col" className="number">Last activity</th>
              <th scope="col" className="number wide-only">Median step</th>
              <th scope="col" className="number wide-only">p99 step</th>
              <th scope="col" className="number wide-only">Compute</th>
              <th scope="col" className="number wide-only">Memory</th>
              <th scope="col" className="number wide-only">CPU</th>
            </tr>
          </thead>
          <tbody>{node.ranks.map((rank) => (
            <Rank key={rank.rank} rank={rank} beatAge={node.age_s} />
          ))}</tbody>
        </table>
      </div>
    </section>
  );
}

/** The views of a run of which something is recorded, or one text if there is nothing. */
export function Ranks() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const run = useRun(name).data;
  if (!run) return <RecordedRanks />;
  return run.attempts.length === 0 ? <Nothing /> : <RanksOf name={name} run={run} />;
}

function RanksOf({ name, run }: { name: string; run: Run }) {
  const live = isLive(run.state);
  // The same requests as those of the views.
  const map = useHeatMap(name, { value: "step" }, live).data;
  const gpus = useGpus(name, {}, live).data;
  const beats = useHeartbeats(name, live).data;
  const problems = [...map?.problems ?? [], ...gpus?.problems ?? []];
  const isEmpty = run.attempts.length === 1 && problems.length === 0 &&
    map?.rows.length === 0 && gpus?.nodes.length === 0 && beats?.nodes.length === 0;
  return isEmpty ? <Nothing /> : <RecordedRanks />;
}

function Nothing() {
  return (
    <Empty title="Nothing is recorded of the ranks yet">
      <p>The agent of each node records steps, heartbeats and GPUs every few seconds.</p>
    </Empty>
  );
}

function RecordedRanks() {
  return (
    <>
      <RanksOverTime />
      <Now />
    </>
  );
}

function Now() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const live = isLive(useRun(name).data?.state ?? "");
  const query = useHeartbeats(name, live);
  return (
    <Loaded query={query}>
      {({ nodes, attempt, clock_problems: clocks }) => nodes.length === 0 ? (
        <Empty title="No heartbeats yet">
          <p>The agent of each node writes a heartbeat every few seconds.</p>
        </Empty>
      ) : (
        <>
          <p className="muted">Latest heartbeats of attempt {attempt}.</p>
          {clocks.map((one) => <p key={one} className="problem">{one}</p>)}
          {nodes.map((node) => <Node key={node.node} node={node} live={live} />)}
        </>
      )}
    </Loaded>
  );
}
