// The curves of a run, alone or over the run that it was forked from.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";
import { useRunsTogether, useSeveralMetrics } from "../../api/comparing";
import type { Run } from "../../api/types";
import { curveSearch } from "../../curveView";
import { runOf } from "../../format";
import { forkMark, marksOf } from "../../story";
import { Copy, Empty, Problem } from "../../parts/basics";
import { CurveSet, type Drawn } from "../../parts/CurveSet";

/** The button that draws a fork's curves over those of its parent. */
function OverParent({ run, over }: { run: Run; over: string | undefined }) {
  const navigate = useNavigate({ from: "/runs/$run" });
  const parent = run.forked_from ? runOf(run.forked_from) : null;
  return (
    <p className="curve-runs">
      {parent ? (
        <button type="button" aria-pressed={over === parent} onClick={() => void navigate({
          search: (old: Record<string, unknown>) =>
            ({ ...old, over: over === parent ? undefined : parent }),
          replace: true, resetScroll: false })}>
          Over its parent {parent}
        </button>
      ) : null}
      <Link to="/compare" search={{ runs: parent ? `${run.run},${parent}` : run.run }}>
        Compare with other runs
      </Link>
    </p>
  );
}

export function Curves({ run }: { run: Run }) {
  const { over } = curveSearch(useSearch({ strict: false }));
  const others = useMemo(() => (over && over !== run.run ? [over] : []), [over, run.run]);
  const names = useMemo(() => [run.run, ...others], [run.run, others]);
  const metrics = useSeveralMetrics(names);
  const runs = useRunsTogether(others);
  const [own, below] = metrics.data;
  const [other] = runs.data;
  const drawn = useMemo((): Drawn[] => {
    if (!own) return [];
    return [{ run, series: own, marks: other ? forkMark(run) : marksOf(run) },
      ...(other && below ? [{ run: other, series: below, marks: [] }] : [])];
  }, [run, other, own, below]);
  const failed = metrics.error ?? runs.error;
  if (!own) {
    return failed ? <Problem error={failed} /> : <p className="loading" role="status">Loading…</p>;
  }
  if (!drawn.some(({ series }) => series.some((one) => one.points.length > 1))) {
    return (
      <Empty title="No curves yet">
        <p>Curves show the values that the program reports at its steps:</p>
        <Copy text="session.log(loss=loss)" label="line that reports a loss" />
      </Empty>
    );
  }
  return (
    <>
      {failed ? (
        <Problem error={failed} title={`${over ?? "The other run"} cannot be drawn.`} />
      ) : null}
      <OverParent run={run} over={over} />
      <CurveSet drawn={drawn} />
    </>
  );
}
