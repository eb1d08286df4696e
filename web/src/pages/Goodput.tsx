// The use of time and the cost of all runs.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";
import {
  useFilterValues, useGoodputGroups, useGoodputTotals, useRuns, type RunWhere,
} from "../api/queries";
import type { Goodput, Money, RunRow } from "../api/types";
import { count, decimal, money as priceOf, percent, span } from "../format";
import { groupOf, GROUPS, type GoodputSearch } from "../goodput";
import { GoodputBar, PartLegend } from "../parts/bars";
import { Empty, Facts, Loaded, State, useTitle } from "../parts/basics";
import { filterOf, isFiltered, pairs, Pick, SINCE } from "../parts/RunFilters";

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
      <td className="prose">
        <Link to="/runs/$run" params={{ run: run.run }} className="run-name">{run.run}</Link>
        <div className="second"><State state={run.state} /></div>
        <div className="narrow-only"><GoodputBar parts={goodput} /></div>
      </td>
      <td className="wide-only"><GoodputBar parts={goodput} /></td>
      <td className="number">{percent(goodput.ettr)}</td>
      <td className="number wide-only">{span(goodput.total_s)}</td>
      <td className="number broad-only">{span(goodput.lost_s)}</td>
      <td className="number broad-only">{count(goodput.steps_lost)}</td>
      <td className="number wide-only">{decimal(goodput.gpu_hours, 1)}</td>
      <td className="number broad-only">{priceOf(goodput.preemption_cost, goodput.currency)}</td>
      <td className="number">{priceOf(goodput.cost, goodput.currency)}</td>
    </tr>
  );
}

/** A run whose account of its time cannot be read, so it is in no total. */
function Odd({ run }: { run: RunRow }) {
  return (
    <tr>
      <td>
        <Link to="/runs/$run" params={{ run: run.run }} className="run-name">{run.run}</Link>
      </td>
      <td colSpan={8} className="muted">unreadable: not counted in the totals</td>
    </tr>
  );
}

function Filters() {
  const { user, partition, account, tag, since } = useSearch({ from: "/goodput" });
  const navigate = useNavigate({ from: "/goodput" });
  const values = useFilterValues().data;
  const to = (name: Exclude<keyof GoodputSearch, "by">) => (value: string | undefined) =>
    void navigate({ search: (old) => ({ ...old, [name]: value }) });
  return (
    <div className="toolbar" role="search">
      <Pick label="User" value={user} values={pairs(values?.users)} pick={to("user")} />
      <Pick label="Partition" value={partition} values={pairs(values?.partitions)}
        pick={to("partition")} />
      <Pick label="Account" value={account} values={pairs(values?.accounts)} pick={to("account")} />
      <Pick label="Tag" value={tag} values={pairs(values?.tags)} pick={to("tag")} />
      <Pick label="Submitted in" value={since} values={SINCE} pick={to("since")} />
    </div>
  );
}

const HEADERS = { user: "User", partition: "Partition", account: "Account", tag: "Tag" } as const;

/** The totals by user, partition, account or tag. */
function Groups({ where }: { where: RunWhere }) {
  const { by = "user" } = useSearch({ from: "/goodput" });
  const navigate = useNavigate({ from: "/goodput" });
  return (
    <section className="section">
      <div className="section-head">
        <h2>By {by}</h2>
        <div className="toolbar">
          <Pick label="Group by" usual="user" value={groupOf(by)} values={pairs([...GROUPS])}
            pick={(next) => void navigate({ search: (old) => ({ ...old, by: groupOf(next) }) })} />
        </div>
      </div>
      {by === "tag" ? (
        <p className="muted">A run with several tags counts in the group of each.</p>
      ) : null}
      <Loaded query={useGoodputGroups(where, by)}>
        {(groups) => (
          <div className="table-wrap" tabIndex={0} role="region" aria-label={`Goodput by ${by}`}>
            <table>
              <thead>
                <tr>
                  <th scope="col">{HEADERS[by]}</th>
                  <th scope="col" className="number">Runs</th>
                  <th scope="col" className="wide-only">Use of time</th>
                  <th scope="col" className="number">Goodput</th>
                  <th scope="col" className="number">GPU-hours</th>
                  <th scope="col" className="number wide-only">Lost to preemption</th>
                  <th scope="col" className="number">Cost</th>
                </tr>
              </thead>
              <tbody>
                {groups.map(({ name, totals }) => (
                  <tr key={name ?? ""}>
                    <td>{name ? <bdi>{name}</bdi>
                      : <span className="muted">{by === "tag" ? "no tag" : "default"}</span>}</td>
                    <td className="number">{count(totals.runs)}</td>
                    <td className="wide-only">
                      <GoodputBar parts={{ ...totals, ettr: totals.ettr ?? 0 }} />
                    </td>
                    <td className="number">{percent(totals.ettr)}</td>
                    <td className="number">{decimal(totals.gpu_hours, 1)}</td>
                    <td className="number wide-only">
                      {decimal(totals.preemption_gpu_hours, 1)}
                    </td>
                    <td className="number">{moneyOf(totals.money, "cost")}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </Loaded>
    </section>
  );
}

/** The totals over all matching runs, also of those that are not loaded below. */
function Totals({ where }: { where: RunWhere }) {
  return (
    <Loaded query={useGoodputTotals(where)}>
      {(total) => (
        <section className="section">
          <Facts
            facts={[
              ["Goodput", percent(total.ettr)],
              ["Runs", count(total.runs)],
              ["Time of all runs", span(total.total_s)],
              ["GPU-hours", decimal(total.gpu_hours, 1)],
              ["GPU-hours lost to preemption", decimal(total.preemption_gpu_hours, 1)],
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
  const given = useSearch({ from: "/goodput" });
  const where = filterOf(given);
  const list = useRuns(where);
  const runs = useMemo(
    () => list.data?.pages.flatMap((page) => page.items),
    [list.data],
  );
  return (
    <>
      <div className="head"><h1>Goodput and cost</h1></div>
      <Filters />
      <Loaded query={{ data: runs, error: list.error }}>
        {(found) => found.length === 0 ? (
          <Empty title={isFiltered(given) ? "No matching runs" : "No runs yet"}>
            <p>This page shows the use of time and the cost of all runs.</p>
          </Empty>
        ) : (
          <>
            <Totals where={where} />
            <Groups where={where} />
            <h2>By run</h2>
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Goodput by run">
              <table>
                <thead>
                  <tr>
                    <th scope="col">Run</th>
                    <th scope="col" className="wide-only">Use of time</th>
                    <th scope="col" className="number">Goodput</th>
                    <th scope="col" className="number wide-only">Time</th>
                    <th scope="col" className="number broad-only">Lost</th>
                    <th scope="col" className="number broad-only">Steps redone</th>
                    <th scope="col" className="number wide-only">GPU-hours</th>
                    <th scope="col" className="number broad-only">Preemption cost</th>
                    <th scope="col" className="number">Cost</th>
                  </tr>
                </thead>
                <tbody>{found.map((run) => (run.goodput
                  ? <Line key={run.uid} run={run as Counted} />
                  : <Odd key={run.uid} run={run} />))}</tbody>
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
