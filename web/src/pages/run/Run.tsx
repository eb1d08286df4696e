// One run: its state, its facts and its actions, with one of its views below.
import { Link, Outlet, useParams } from "@tanstack/react-router";
import { useMayAct } from "../../api/session";
import { useRun } from "../../api/queries";
import type { Run } from "../../api/types";
import { count, money, percent, span } from "../../format";
import { ActionButton, type Action } from "../../parts/Confirm";
import { Facts, Loaded, State, Time, useTitle } from "../../parts/basics";
import { isLive } from "../../states";
import { stateOf, unsupervised } from "../../story";
import { committedStep, stepOf, timeLeft } from "../../progress";

const TABS = [
  ["", "Overview"],
  ["/checkpoints", "Checkpoints"],
  ["/lineage", "Lineage"],
  ["/ranks", "Ranks & nodes"],
  ["/logs", "Logs"],
  ["/events", "Events"],
] as const;

/** Which sizes the next attempt may have: those that the newest checkpoint fits. */
function sizeWords({ gpus_min: least, gpus_max: most, gpus_fitting: fitting }: Run): string {
  const range = least && most ? ` (${least} to ${most})` : "";
  return `GPUs of the next attempt${fitting ? ` (${fitting.join(", ")})` : range}`;
}

/** What happens to the current attempt before the next one starts. */
function relaunchWords(run: Run): string {
  const last = run.attempts.at(-1);
  if (!last || last.ended_at !== null) return "No attempt is running.";
  if (last.started_at === null) return `Attempt ${last.number} is removed from the queue.`;
  return `Attempt ${last.number} ${endingWords(run, "ends")}`;
}

/** How a run ends that has begun: with a final checkpoint only if its ranks have a Session. */
function endingWords(run: Run, ends: string): string {
  const begun = run.attempts.some((one) => one.started_at !== null);
  return begun && !run.saves_by_holdfast
    ? `${ends}. No rank has opened a Session, so nothing is saved.`
    : `saves a final checkpoint and ${ends}.`;
}

function actionsOf(run: Run): Action[] {
  const base = `/runs/${encodeURIComponent(run.run)}`;
  const live = isLive(run.state);
  const size = run.attempts.at(-1)?.gpus;
  const relaunch: Action = {
    word: "Relaunch",
    title: `Relaunch ${run.run}`,
    path: `${base}/relaunch`,
    field: { name: "gpus", label: sizeWords(run), type: "number", required: true,
      initial: size ? String(size) : "" },
    explanation: (
      <p>
        {relaunchWords(run)} The same command then resumes from the newest checkpoint at this size.
      </p>
    ),
  };
  const stop: Action = {
    word: "Stop",
    title: `Stop ${run.run}`,
    path: `${base}/stop`,
    disabled: live ? null : "The run is not live.",
    explanation: <p>The run {endingWords(run, "ends")} Relaunch continues it.</p>,
  };
  const paused = run.state === "paused";
  const pause: Action = paused
    ? { id: "pause", word: "Resume", title: `Resume ${run.run}`, path: `${base}/resume`,
        explanation: <p>The run resumes from its newest checkpoint when GPUs are
          available.</p> }
    : { id: "pause", word: "Pause", title: `Pause ${run.run}`, path: `${base}/pause`,
        disabled: live ? null : "The run is not live.",
        explanation: <p>The run {endingWords(run,
          "releases its GPUs until it is resumed")}</p> };
  const cancelling = stateOf(run) === "cancelling";
  const cancel: Action = cancelling
    ? { id: "cancel", word: "Cancel now", title: `Cancel ${run.run} now`, path: `${base}/cancel`,
        body: { now: true },
        explanation: <p>The run ends at once. It does not finish its final checkpoint, so the steps
          since its newest committed checkpoint are lost.</p> }
    : { id: "cancel", word: "Cancel", title: `Cancel ${run.run}`, path: `${base}/cancel`,
        disabled: live ? null : "The run is not live.",
        explanation: <p>The run {endingWords(run, "ends, and its GPUs are released")} Its committed
          checkpoints are kept, and Relaunch continues it.</p> };
  return [relaunch, pause, stop, cancel].map((one) => ({ ...one, forceable: true }));
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
        <span className="muted">{run.reason ?? `submitted by ${run.created_by}`}</span>
        <div className="actions">
          {mayAct ? actionsOf(run).map((one) => (
            <ActionButton key={one.id ?? one.word} action={one} />
          )) : <span className="muted">Read-only</span>}
        </div>
      </div>
      <Facts
        facts={[
          ["Step", step === null ? "none yet"
            : run.steps_total ? `${count(step)} / ${count(run.steps_total)}` : count(step)],
          ["Time left", span(timeLeft(run))],
          ["GPUs", count(last?.gpus)],
          ["Attempts", count(run.attempts.length)],
          ["Successor", run.successor && (run.successor.job_id
            ? `job ${run.successor.job_id} queued` : "no answer from Slurm yet")],
          ["Goodput", <>{percent(goodput.ettr)} <small>of {span(goodput.total_s)}</small></>],
          ["Steps redone", count(goodput.steps_lost)],
          ["Committed step", run.saves_by_holdfast === false
            ? "never: the program has no Session" : count(committedStep(run))],
          ["Cost", goodput.cost === null ? null : money(goodput.cost, goodput.currency)],
          ["Started", <Time at={run.created_at} />],
          ["Ended", run.ended_at ? <Time at={run.ended_at} /> : null],
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
