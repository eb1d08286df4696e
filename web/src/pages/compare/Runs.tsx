// Comparison of runs: their curves on the same axes, and what differs between them.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";
import { useRunsComparison, useRunsTogether, useSeveralMetrics } from "../../api/comparing";
import type { Run, RunsComparison, RunsFact, Series } from "../../api/types";
import { runsOf } from "../../curveView";
import { count, runOf } from "../../format";
import { Empty, Loaded, Problem, State } from "../../parts/basics";
import { CurveSet, type Drawn } from "../../parts/CurveSet";
import { RunPicker } from "../../parts/Picker";
import { plain } from "../../states";
import { forkMark, stateOf } from "../../story";
import { AllSwitch } from "./AllSwitch";
import { show, titleOf } from "./facts";

const RUNS_MAX = 8;

function Chosen({ runs, found, set }: {
  runs: string[];
  found: (Run | undefined)[];
  set: (runs: string[]) => void;
}) {
  return (
    <>
      <ul className="chips" aria-label="Compared runs">
        {runs.map((run, index) => (
          <li key={run}>
            <span className={`swatch curve-${index + 1}`} aria-hidden />
            <Link to="/runs/$run" params={{ run }}>{run}</Link>
            {found[index] ? <State state={stateOf(found[index])} /> : null}
            <button type="button" className="plain" aria-label={`Remove ${run}`}
              onClick={() => set(runs.filter((one) => one !== run))}>×</button>
          </li>
        ))}
      </ul>
      {runs.length < RUNS_MAX ? (
        <div className="pickers">
          <RunPicker label="Add a run" except={runs} pick={(run) => set([...runs, run])} />
        </div>
      ) : <p className="muted">At most {RUNS_MAX} runs are compared.</p>}
    </>
  );
}

function FactRows({ facts, group, columns }: {
  facts: RunsFact[];
  group: string;
  columns: number;
}) {
  if (facts.length === 0) return null;
  return (
    <tbody>
      <tr><th scope="rowgroup" colSpan={columns + 1}>{plain(group)}</th></tr>
      {facts.map((fact) => (
        <tr key={fact.name} className={fact.is_same === false ? "differs" : undefined}>
          <td className="breaks">{titleOf(fact.name)}</td>
          {fact.values.map((value, index) => (
            <td key={index} className="prose breaks">{show(fact.name, value)}</td>
          ))}
        </tr>
      ))}
    </tbody>
  );
}

function Differences({ found }: { found: RunsComparison }) {
  const { all = false } = useSearch({ from: "/compare" });
  const shown = found.facts.filter((fact) =>
    all ? fact.values.some((one) => one !== null) : fact.is_same === false);
  const groups = [...new Set(found.facts.map((fact) => fact.group))];
  return (
    <section className="section">
      <h2>{all ? "Facts" : "Differences"}: {count(shown.length)}</h2>
      <AllSwitch />
      {found.left_out > 0 ? (
        <p className="muted">{count(found.left_out)} equal facts are too many to list.</p>
      ) : null}
      {shown.length === 0 ? <p>These runs have equal facts.</p> : (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Comparison of runs">
          <table className="sides several">
            <thead>
              <tr>
                <th scope="col">Property</th>
                {found.runs.map((run) => (
                  <th key={run} scope="col" className="breaks">
                    <Link to="/runs/$run" params={{ run }}>{run}</Link>
                  </th>
                ))}
              </tr>
            </thead>
            {groups.map((group) => (
              <FactRows key={group} group={group} columns={found.runs.length}
                facts={shown.filter((fact) => fact.group === group)} />
            ))}
          </table>
        </div>
      )}
    </section>
  );
}

/** What is drawn of the runs that were loaded. A fork of another run has a mark where it left. */
function drawnOf(runs: (Run | undefined)[], series: (Series[] | undefined)[]): Drawn[] {
  const names = new Set(runs.map((one) => one?.run));
  return runs.flatMap((run, index): Drawn[] => {
    const own = series[index];
    if (!run || !own) return [];
    const isFork = Boolean(run.forked_from && names.has(runOf(run.forked_from)));
    return [{ run, series: own, marks: isFork ? forkMark(run) : [] }];
  });
}

export function RunComparison() {
  const given = useSearch({ from: "/compare" });
  const runs = useMemo(() => runsOf(given.runs), [given.runs]);
  const navigate = useNavigate({ from: "/compare" });
  const found = useRunsTogether(runs);
  const metrics = useSeveralMetrics(runs);
  const comparison = useRunsComparison(runs);
  const drawn = useMemo(() => drawnOf(found.data, metrics.data), [found.data, metrics.data]);
  const failed = found.error ?? metrics.error;
  const set = (next: string[]) => void navigate({
    search: (old) => ({ ...old, runs: next.join(",") || undefined }) });
  return (
    <>
      <Chosen runs={runs} found={found.data} set={set} />
      {failed ? <Problem error={failed} title="A run cannot be compared." /> : null}
      {runs.length === 0 ? (
        <Empty title="Choose runs">
          <p>Type a part of a run's name above. Up to {RUNS_MAX} runs have their curves on the same
            axes, with what differs between them below.</p>
        </Empty>
      ) : (
        <>
          <section className="section">
            <h2>Curves</h2>
            {drawn.length > 0 ? <CurveSet drawn={drawn} />
              : failed ? null : <p className="loading" role="status">Loading…</p>}
          </section>
          {runs.length > 1 ? (
            <Loaded query={comparison}>{(one) => <Differences found={one} />}</Loaded>
          ) : null}
        </>
      )}
    </>
  );
}
