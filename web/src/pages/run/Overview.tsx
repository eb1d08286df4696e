// What happened to a run, at one look: its attempts against time, its curves, where time went.
import { useParams } from "@tanstack/react-router";
import { useMemo } from "react";
import { stitch } from "../../curves";
import { useMetrics, useNewestCheckpoints, useRun } from "../../api/queries";
import type { Run } from "../../api/types";
import { Chart, type Mark } from "../../parts/Chart";
import { GoodputBar, PartLegend } from "../../parts/bars";
import { Copy, Empty, Loaded } from "../../parts/basics";
import { figure } from "../../format";
import { plain } from "../../states";
import { Attempts, Timeline } from "./Timeline";

const NOTICES_MAX = 5;

/** Where an attempt ended or the size changed, at the step where the next one went on. */
function marksOf(run: Run): Mark[] {
  return run.attempts.slice(1).map((attempt, index) => {
    const before = run.attempts[index];
    const cause = before?.cause ? plain(before.cause) : "relaunch";
    const resized = before && before.world_size !== attempt.world_size
      ? ` → ${attempt.world_size} GPUs` : "";
    return {
      x: attempt.resumed_step ?? attempt.first_step ?? 0,
      word: `${cause}${resized}`,
      tone: before?.state === "preempted" ? "warn" : before?.cause ? "bad" : "note",
    };
  });
}

function Curves({ run }: { run: Run }) {
  const query = useMetrics(run.run);
  const curves = useMemo(() => query.data && stitch(query.data), [query.data]);
  const marks = useMemo(() => marksOf(run), [run]);
  return (
    <Loaded query={{ data: curves, error: query.error }}>
      {(all) => {
        const told = all.filter((one) => one.x.length > 1);
        if (told.length === 0) {
          return (
            <Empty title="No curves yet">
              <p>They come from what the program reports at its steps:</p>
              <Copy text="session.log(loss=loss)" label="line that reports a loss" />
            </Empty>
          );
        }
        return (
          <div className="curves">
            {told.map((one) => (
              <div key={one.name}>
                <h3>
                  {plain(one.name)}{" "}
                  <strong>{figure(one.y.findLast((value) => value !== null))}</strong>
                </h3>
                <Chart x={one.x} y={one.y} label={plain(one.name)} xLabel="step" marks={marks} />
              </div>
            ))}
          </div>
        );
      }}
    </Loaded>
  );
}

/** What somebody should know who looks now: lost folders, failed saves, what the watch noticed. */
function Notices({ run }: { run: Run }) {
  const told = [
    ...(run.on_disk === false
      ? ["The run's folder is gone, or its root is not mounted. This is what the index last knew."]
      : []),
    ...(run.failed_saves ?? []).slice(-NOTICES_MAX)
      .map((one) => `The save of step ${one.step} was not committed: ${one.error}`),
    ...(run.noticed ?? []).slice(-NOTICES_MAX).map((one) => one.text),
  ];
  return told.map((text) => <p key={text} className="problem">{text}</p>);
}

export function Overview() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const query = useRun(name);
  const checkpoints = useNewestCheckpoints(name);
  return (
    <Loaded query={query}>
      {(run) => (
        <>
          <Notices run={run} />
          <section className="section">
            <h2>Attempts</h2>
            <Timeline attempts={run.attempts} checkpoints={checkpoints.data ?? []} />
            <Attempts attempts={run.attempts} />
          </section>
          <section className="section">
            <h2>Where the time went</h2>
            <GoodputBar parts={run.goodput} />
            <PartLegend parts={run.goodput} />
          </section>
          <section className="section">
            <h2>Curves over all attempts</h2>
            <Curves run={run} />
          </section>
        </>
      )}
    </Loaded>
  );
}
