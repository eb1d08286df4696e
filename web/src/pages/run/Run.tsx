// One run: its state, its facts and its actions, with one of its views below.
import { Link, Outlet, useParams } from "@tanstack/react-router";
import { Fragment } from "react";
import { useMayAct } from "../../api/session";
import { useRun } from "../../api/queries";
import type { Run } from "../../api/types";
import { count, money, percent, span } from "../../format";
import { Facts, Loaded, State, Time, useTitle } from "../../parts/basics";
import { kindWords } from "../../parts/Attention";
import { AnnotateButton, Note, RunTags } from "../../parts/Tags";
import { stateOf, unsupervised } from "../../story";
import { committedStep, stepOf, timeLeft } from "../../progress";
import { Actions } from "./actions";

const TABS = [
  ["", "Overview"],
  ["/checkpoints", "Checkpoints"],
  ["/lineage", "Lineage"],
  ["/ranks", "Ranks & nodes"],
  ["/errors", "Errors"],
  ["/logs", "Logs"],
  ["/events", "Events"],
] as const;

/** The run's own runs in experiment trackers, with links where they have a page. */
function Trackers({ run: { trackers } }: { run: Run }) {
  return trackers.map(({ tracker, tracker_id: id, url }, index) => (
    <Fragment key={tracker}>
      {index > 0 ? ", " : null}
      {url ? <a href={url} target="_blank" rel="noreferrer">{tracker}</a>
        : <span title={id}>{tracker}</span>}
    </Fragment>
  ));
}

function Head({ run }: { run: Run }) {
  const mayAct = useMayAct();
  const { goodput } = run;
  const last = run.attempts.at(-1);
  const step = stepOf(run);
  return (
    <>
      <div className="head">
        <h1>{run.run}</h1>
        <State state={stateOf(run)} />
        {unsupervised(run) ? <State state="silent">no supervisor</State> : null}
        {[...new Set(run.unprotected.map((one) => one.lacks))].map((lacks) => (
          <State key={lacks} state="stopping">
            {kindWords(lacks === "spares" ? "spares_used" : "unprotected")}
          </State>
        ))}
        <span className="muted">{run.reason ?? `submitted by ${run.created_by}`}</span>
        <RunTags tags={run.tags} />
        <div className="actions">
          {mayAct ? (
            <>
              <AnnotateButton name={run.run} path={`/runs/${encodeURIComponent(run.run)}`}
                of={run} />
              <Actions run={run} />
            </>
          ) : <span className="muted">Read-only</span>}
        </div>
      </div>
      <Note of={run} />
      <Facts
        facts={[
          ["Step", step === null ? "none yet"
            : run.steps_total ? `${count(step)} / ${count(run.steps_total)}` : count(step)],
          ["Time left", span(timeLeft(run))],
          ["GPUs", count(last?.gpus)],
          ["Attempts", count(run.attempts.length)],
          ["Successor", run.successor && (run.successor.job_id
            ? `job ${run.successor.job_id} queued` : "no answer from Slurm yet")],
          ["Goodput", goodput
            ? <>{percent(goodput.ettr)} <small>of {span(goodput.total_s)}</small></>
            : "unreadable"],
          ["Steps redone", goodput && count(goodput.steps_lost)],
          ["Committed step", run.saves_by_holdfast === false
            ? "never: the program has no Session" : count(committedStep(run))],
          ["Cost", typeof goodput?.cost === "number"
            ? money(goodput.cost, goodput.currency) : null],
          ["Started", <Time at={run.created_at} />],
          ["Ended", run.ended_at ? <Time at={run.ended_at} /> : null],
          ["Tracker", run.trackers.length > 0 ? <Trackers run={run} /> : null],
          ["Forked from", run.forked_from ? (
            <Link to="/checkpoints/$id" params={{ id: run.forked_from }}>{run.forked_from}</Link>
          ) : null],
        ]}
      />
    </>
  );
}

function Tabs({ run }: { run: string }) {
  return (
    <nav className="tabs" aria-label="Views of this run">
      {TABS.map(([end, name]) => (
        <Link
          key={name}
          to={`/runs/$run${end}`}
          params={{ run }}
          activeOptions={{ exact: true, includeSearch: false }}
        >
          {name}
        </Link>
      ))}
    </nav>
  );
}

export function RunPage() {
  const { run: name } = useParams({ from: "/runs/$run" });
  useTitle(name);
  const query = useRun(name);
  return (
    <>
      <p className="crumbs"><Link to="/">Runs</Link> / {name}</p>
      <Loaded query={query}>
        {(run) => (
          <>
            <Head run={run} />
            <Tabs run={name} />
            <Outlet />
          </>
        )}
      </Loaded>
    </>
  );
}
