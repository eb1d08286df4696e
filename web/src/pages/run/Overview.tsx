// What happened to a run, at one look: its attempts against time, its curves, where time went.
import { useParams } from "@tanstack/react-router";
import { useMemo } from "react";
import { useAllCheckpoints, useMetrics, useRun } from "../../api/queries";
import type { Run } from "../../api/types";
import { Chart, type Mark } from "../../parts/Chart";
import { GoodputBar, PartLegend } from "../../parts/bars";
import { Copy, Empty, Loaded } from "../../parts/basics";
import { plain } from "../../states";
import { Attempts, Timeline } from "./Timeline";

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
  const marks = useMemo(() => marksOf(run), [run]);
  return (
    <Loaded query={query}>
      {(series) => {
        const told = series.filter((one) => one.x.length > 1);
        if (told.length === 0) {
          return (
            <Empty title="No curves yet">
              <p>They come from what the program reports at its steps:</p>
              <Copy text="session.log(loss=loss)" label="line that reports a loss" />
            </Empty>
          );
        }
        return told.map((one) => (
          <div key={one.name} className="section">
            <h3>{one.name}</h3>
            <Chart x={one.x} y={one.y} label={one.name} xLabel="step" marks={marks} />
          </div>
        ));
      }}
    </Loaded>
  );
}

export function Overview() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const query = useRun(name);
  const checkpoints = useAllCheckpoints(name);
  return (
    <Loaded query={query}>
      {(run) => (
        <>
          <section className="section">
            <h2>Attempts</h2>
            <Timeline attempts={run.attempts} checkpoints={checkpoints.data ?? []} />
            <Attempts attempts={run.attempts} />
          </section>
          <section className="section">
            <h2>Curves over all attempts</h2>
            <Curves run={run} />
          </section>
          <section className="section">
            <h2>Where the time went</h2>
            <GoodputBar parts={run.goodput} />
            <PartLegend parts={run.goodput} />
          </section>
        </>
      )}
    </Loaded>
  );
}
