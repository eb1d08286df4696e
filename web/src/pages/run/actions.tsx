// The actions of an operator on a run: what each does, what it costs, and why it is refused.
import { useTimeline } from "../../api/queries";
import type { Run } from "../../api/types";
import { count } from "../../format";
import { ActionButton, type Action } from "../../parts/Confirm";
import { FreeGpus, newestOrder, OrderState } from "../../parts/Orders";
import { returnWords, stepsWords, unsavedSteps } from "../../price";
import { committedStep } from "../../progress";
import { isLive } from "../../states";
import { gpus, stateOf } from "../../story";

const SIZES_LISTED_MAX = 8;

/** Which sizes the next attempt may have: those that the newest checkpoint fits. */
function sizeWords(run: Run): string {
  const { gpus_min: least, gpus_max: most, gpus_fitting: fitting, gpus_allowed: allowed } = run;
  const sizes = fitting ?? allowed;
  const range = least && most ? (least === most ? `${least}` : `${least} to ${most}`) : "";
  const words = sizes && sizes.length <= SIZES_LISTED_MAX ? sizes.join(", ") : range;
  return words ? `GPUs of the next attempt (allowed: ${words})` : "GPUs of the next attempt";
}

/** What happens to the current attempt: it leaves the queue, or ends with or without a save. */
function endWords(run: Run, ends: string): string {
  const last = run.attempts.at(-1);
  if (!last || last.ended_at !== null) return "No attempt is running.";
  if (last.started_at === null) return `Attempt ${last.number} is removed from the queue.`;
  return run.saves_by_holdfast
    ? `Attempt ${last.number} saves a final checkpoint and ${ends}.`
    : `Attempt ${last.number} ${ends}. No rank has opened a Session, so nothing is saved.`;
}

/** The steps that are at risk while the current attempt ends. */
function Risk({ run, isNow = false }: { run: Run; isNow?: boolean }) {
  const last = run.attempts.at(-1);
  const steps = unsavedSteps(run);
  if (!last || last.ended_at !== null || last.started_at === null || steps === null) return null;
  const words = stepsWords(steps, run.step_s);
  if (isNow || !run.saves_by_holdfast) {
    return <p>Lost: {steps === 0 ? "no step" : `${words} since the newest checkpoint`}.</p>;
  }
  if (steps === 0) return null;
  return <p>No step is lost if that save succeeds. If it fails, the run loses {words}.</p>;
}

function Return({ run }: { run: Run }) {
  const words = returnWords(useTimeline(run.run).data ?? []);
  return words ? <p>{words}</p> : null;
}

function relaunchOf(run: Run, base: string): Action {
  const size = run.attempts.at(-1)?.gpus;
  const step = isLive(run.state) ? null : committedStep(run);
  const from = step === null ? "" : `, of step ${count(step)},`;
  return {
    word: "Relaunch",
    title: `Relaunch ${run.run}`,
    path: `${base}/relaunch`,
    field: { name: "gpus", label: sizeWords(run), type: "number", required: true,
      initial: size ? String(size) : "" },
    disabled: run.refusals.relaunch ?? null,
    explanation: (
      <>
        <p>
          {endWords(run, "ends")} The same command then resumes from the newest
          checkpoint{from} at this size.
        </p>
        <Risk run={run} />
        <Return run={run} />
        <FreeGpus name={run.run} />
      </>
    ),
  };
}

function pauseOf(run: Run, base: string, disabled: string | null): Action {
  if (run.state === "paused") {
    return {
      id: "pause", word: "Resume", title: `Resume ${run.run}`, path: `${base}/resume`,
      disabled: run.refusals.resume ?? null,
      explanation: (
        <>
          <p>The run resumes from its newest checkpoint when GPUs are available.</p>
          <Return run={run} />
          <FreeGpus name={run.run} />
        </>
      ),
    };
  }
  const held = run.attempts.at(-1)?.gpus;
  return {
    id: "pause", word: "Pause", title: `Pause ${run.run}`, path: `${base}/pause`,
    disabled: run.refusals.pause ?? disabled,
    explanation: (
      <>
        <p>
          {endWords(run, `releases its ${held ? gpus(held) : "GPUs"} until the run is resumed`)}
          {" "}The run waits until you resume it.
        </p>
        <Risk run={run} />
      </>
    ),
  };
}

function cancelOf(run: Run, base: string, disabled: string | null): Action {
  if (stateOf(run) === "cancelling") {
    return {
      id: "cancel", word: "Cancel now", title: `Cancel ${run.run} now`, path: `${base}/cancel`,
      body: { now: true },
      explanation: (
        <>
          <p>The run ends at once. It does not finish its final checkpoint, so the steps since its
            newest committed checkpoint are lost.</p>
          <Risk run={run} isNow />
        </>
      ),
    };
  }
  return {
    id: "cancel", word: "Cancel", title: `Cancel ${run.run}`, path: `${base}/cancel`,
    disabled: run.refusals.cancel ?? disabled,
    explanation: (
      <>
        <p>{endWords(run, "ends, and its GPUs are released")} The run&apos;s committed checkpoints
          are kept, and Relaunch continues it.</p>
        <Risk run={run} />
      </>
    ),
  };
}

export function actionsOf(run: Run): Action[] {
  const base = `/runs/${encodeURIComponent(run.run)}`;
  const disabled = isLive(run.state) ? null : "The run is not live.";
  const stop: Action = {
    word: "Stop",
    title: `Stop ${run.run}`,
    path: `${base}/stop`,
    disabled: run.refusals.stop ?? disabled,
    explanation: (
      <>
        <p>{endWords(run, "ends")} Relaunch continues the run.</p>
        <Risk run={run} />
      </>
    ),
  };
  const after = newestOrder(run);
  const done = (answer: Record<string, unknown>) => (
    <>
      {typeof answer.message === "string" ? answer.message : "Done."}
      <OrderState name={run.run} after={after} />
    </>
  );
  return [relaunchOf(run, base), pauseOf(run, base, disabled), stop,
    cancelOf(run, base, disabled)].map((one) => ({ ...one, forceable: true, done }));
}

export function Actions({ run }: { run: Run }) {
  const { relaunch } = run.refusals;
  return (
    <>
      {actionsOf(run).map((one) => <ActionButton key={one.id ?? one.word} action={one} />)}
      {relaunch ? <span className="refusal muted">{relaunch}</span> : null}
    </>
  );
}
