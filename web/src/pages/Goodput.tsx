// What all the runs' time was spent on and what preemptions cost.
import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { useRuns } from "../api/queries";
import type { Goodput, RunRow } from "../api/types";
import { count, money, percent, span } from "../format";
import { GoodputBar, PartLegend, type Parts } from "../parts/bars";
import { Empty, Facts, Loaded, State, useTitle } from "../parts/basics";

const ADDED = [
  "total_s", "queued_s", "starting_s", "loading_s", "training_s", "lost_s", "blocked_s", "hung_s",
  "flushing_s", "stopped_s", "gpu_hours", "preemption_gpu_hours", "steps_lost",
] as const;

type Total = Record<(typeof ADDED)[number], number>;

type Counted = RunRow & { goodput: Goodput };

const sum = (runs: Counted[]): Total =>
  Object.fromEntries(
    ADDED.map((name) => [name, runs.reduce((all, { goodput }) => all + (goodput[name] ?? 0), 0)]),
  ) as Total;

const moneyOf = (runs: Counted[], name: "cost" | "preemption_cost" | "saved"): string => {
  const told = runs.filter(({ goodput }) => goodput[name] !== null);
  const currencies = new Set(told.map(({ goodput }) => goodput.currency));
  if (told.length === 0) return "no price given";
  return [...currencies]
    .map((one) => money(told.filter(({ goodput }) => goodput.currency === one)
      .reduce((all, { goodput }) => all + (goodput[name] ?? 0), 0), one))
    .join(" + ");
};

function Line({ run }: { run: Counted }) {
  const { goodput } = run;
  return (
    <tr>
      <td>
        <Link to="/runs/$run" params={{ run: run.run }}>{run.run}</Link>
        <div className="second"><State state={run.state} /></div>
        <div className="narrow-only"><GoodputBar parts={goodput} /></div>
      </td>
      <td className="wide-only"><GoodputBar parts={goodput} /></td>
      <td className="number">{percent(goodput.ettr)}</td>
      <td className="number wide-only">{span(goodput.total_s)}</td>
      <td className="number wide-only">{span(goodput.lost_s)}</td>
      <td className="number wide-only">{count(goodput.steps_lost)}</td>
      <td className="number wide-only">{goodput.gpu_hours.toFixed(1)}</td>
      <td className="number wide-only">{money(goodput.preemption_cost, goodput.currency)}</td>
      <td className="number">{money(goodput.cost, goodput.currency)}</td>
    </tr>
  );
}

function Totals({ runs }: { runs: Counted[] }) {
  const total = useMemo(() => sum(runs), [runs]);
  const parts: Parts = total;
  return (
    <section className="section">
      <Facts
        facts={[
          ["Productive", percent(total.total_s > 0 ? total.training_s / total.total_s : null)],
          ["Time of all runs", span(total.total_s)],
          ["GPU hours", total.gpu_hours.toFixed(1)],
          ["GPU hours preempted", total.preemption_gpu_hours.toFixed(1)],
          ["Steps trained twice", count(total.steps_lost)],
          ["Cost", moneyOf(runs, "cost")],
          ["Cost of preemptions", moneyOf(runs, "preemption_cost")],
          ["Saved on spot prices", moneyOf(runs, "saved")],
        ]}
      />
      <GoodputBar parts={parts} />
      <PartLegend parts={parts} />
    </section>
  );
}

export function GoodputPage() {
  useTitle("Goodput and cost");
  const list = useRuns({});
  const runs = useMemo(
    () => list.data?.pages.flatMap((page) => page.items)
      .filter((run): run is Counted => Boolean(run.goodput)),
    [list.data],
  );
  return (
    <>
      <div className="head"><h1>Goodput and cost</h1></div>
      <Loaded query={{ data: runs, error: list.error }}>
        {(told) => told.length === 0 ? (
          <Empty title="No runs, no costs">
            <p>Every second of a run is accounted for here once there is one.</p>
          </Empty>
        ) : (
          <>
            <Totals runs={told} />
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Goodput by run">
              <table>
                <thead>
                  <tr>
                    <th scope="col">Run</th>
                    <th scope="col" className="wide-only">Where its time went</th>
                    <th scope="col" className="number">Productive</th>
                    <th scope="col" className="number wide-only">Time</th>
                    <th scope="col" className="number wide-only">Lost</th>
                    <th scope="col" className="number wide-only">Steps twice</th>
                    <th scope="col" className="number wide-only">GPU hours</th>
                    <th scope="col" className="number wide-only">For preemptions</th>
                    <th scope="col" className="number">Cost</th>
                  </tr>
                </thead>
                <tbody>{told.map((run) => <Line key={run.uid} run={run} />)}</tbody>
              </table>
            </div>
            {list.hasNextPage ? (
              <p>
                <button type="button" disabled={list.isFetchingNextPage}
                  onClick={() => void list.fetchNextPage()}>Count older runs, too</button>
              </p>
            ) : null}
          </>
        )}
      </Loaded>
    </>
  );
}
