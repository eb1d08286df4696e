// The use of time and the cost of all runs.
import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { useGoodputTotals, useRuns } from "../api/queries";
import type { Goodput, Money, RunRow } from "../api/types";
import { count, money as priceOf, percent, span } from "../format";
import { GoodputBar, PartLegend } from "../parts/bars";
import { Empty, Facts, Loaded, State, useTitle } from "../parts/basics";

type Counted = RunRow & { goodput: Goodput };

const moneyOf = (money: Money[], name: "cost" | "preemption_cost" | "saved"): string => {
  const known = money.filter((one) => one[name] !== null);
  if (known.length === 0) return "no price set";
  return known.map((one) => priceOf(one[name], one.currency)).join(" + ");
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
      <td className="number wide-only">{priceOf(goodput.preemption_cost, goodput.currency)}</td>
      <td className="number">{priceOf(goodput.cost, goodput.currency)}</td>
    </tr>
  );
}

/** The totals over all runs, also of those that are not loaded below. */
function Totals() {
  return (
    <Loaded query={useGoodputTotals()}>
      {(total) => (
        <section className="section">
          <Facts
            facts={[
              ["Productive", percent(total.ettr)],
              ["Runs", count(total.runs)],
              ["Time of all runs", span(total.total_s)],
              ["GPU-hours", total.gpu_hours.toFixed(1)],
              ["GPU-hours lost to preemption", total.preemption_gpu_hours.toFixed(1)],
              ["Steps redone", count(total.steps_lost)],
              ["Cost", moneyOf(total.money, "cost")],
              ["Preemption cost", moneyOf(total.money, "preemption_cost")],
              ["Saved on spot prices", moneyOf(total.money, "saved")],
            ]}
          />
          <GoodputBar parts={{ ...total, ettr: total.ettr ?? 0 }} />
          <PartLegend parts={{ ...total, ettr: total.ettr ?? 0 }} />
        </section>
      )}
    </Loaded>
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
        {(found) => found.length === 0 ? (
          <Empty title="No runs yet">
            <p>This page shows the use of time and the cost of all runs.</p>
          </Empty>
        ) : (
          <>
            <Totals />
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Goodput by run">
              <table>
                <thead>
                  <tr>
                    <th scope="col">Run</th>
                    <th scope="col" className="wide-only">Use of time</th>
                    <th scope="col" className="number">Productive</th>
                    <th scope="col" className="number wide-only">Time</th>
                    <th scope="col" className="number wide-only">Lost</th>
                    <th scope="col" className="number wide-only">Steps redone</th>
                    <th scope="col" className="number wide-only">GPU-hours</th>
                    <th scope="col" className="number wide-only">Preemption cost</th>
                    <th scope="col" className="number">Cost</th>
                  </tr>
                </thead>
                <tbody>{found.map((run) => <Line key={run.uid} run={run} />)}</tbody>
              </table>
            </div>
            {list.hasNextPage ? (
              <p>
                <button type="button" disabled={list.isFetchingNextPage}
                  onClick={() => void list.fetchNextPage()}>Show more</button>
              </p>
            ) : null}
          </>
        )}
      </Loaded>
    </>
  );
}
