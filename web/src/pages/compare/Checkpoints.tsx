// Comparison of two checkpoints: code, data, environment, size and metrics.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { useComparison } from "../../api/queries";
import type { Fact } from "../../api/types";
import { checkpointWords, count, runOf } from "../../format";
import { Empty, Facts, Loaded } from "../../parts/basics";
import { CheckpointPicker, RunPicker } from "../../parts/Picker";
import { AllSwitch } from "./AllSwitch";
import { hasValue, show, titleOf } from "./facts";

function Rows({ facts, all }: { facts: Fact[]; all: boolean }) {
  return facts
    .filter((fact) => all || (!fact.is_same && (hasValue(fact.one) || hasValue(fact.other))))
    .map(({ name, one, other, is_same: same }) => (
      <tr key={name} className={same === false ? "differs" : undefined}>
        <td>{titleOf(name)}</td>
        <td className="prose breaks">{show(name, one)}</td>
        <td className="prose breaks">{show(name, other)}</td>
        <td className="nowrap wide-only">
          {same === null ? "unknown" : same ? "same" : "differs"}
        </td>
      </tr>
    ));
}

const wordOf = (id: string | undefined): string =>
  id?.includes(":") ? id.slice(id.lastIndexOf(":") + 1) : "";

/** One side: a run, and one of its checkpoints. */
function Side({ side, id, pick }: {
  side: string;
  id: string | undefined;
  pick: (id: string) => void;
}) {
  const [run, setRun] = useState(id ? runOf(id) : "");
  return (
    <div className="side" role="group" aria-label={`Checkpoint ${side}`}>
      <RunPicker key={`run ${run}`} label={`Run ${side}`} value={run} pick={(chosen) => {
        setRun(chosen);
        pick(`${chosen}:latest`);
      }} />
      {run ? (
        <CheckpointPicker key={id} label={`Checkpoint ${side}`} run={run} value={wordOf(id)}
          pick={(name) => pick(`${run}:${name}`)} />
      ) : null}
    </div>
  );
}

function Outcome({ a, b }: { a: string; b: string }) {
  const query = useComparison(a, b);
  const { all = false } = useSearch({ from: "/compare" });
  return (
    <Loaded query={query}>
      {(found) => {
        const facts = [...found.facts, ...found.metrics];
        const different = facts.filter((fact) => fact.is_same === false);
        const settings = found.config.filter((fact) => fact.is_same === false);
        return (
          <>
            <Facts
              facts={[
                ["Differences", `${different.length} of ${facts.length}`],
                ["Common ancestor", found.common_ancestor ? (
                  <Link to="/checkpoints/$id" params={{ id: found.common_ancestor }}>
                    {checkpointWords(found.common_ancestor)}
                  </Link>
                ) : "none"],
                ["Settings that differ",
                  `${count(settings.length)} of ${count(found.config.length)}`],
              ]}
            />
            <AllSwitch />
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Comparison">
              <table className="sides">
                <thead>
                  <tr>
                    <th scope="col">Property</th>
                    {[found.one, found.other].map((id, side) => (
                      <th key={`${side}${id}`} scope="col" className="breaks">
                        <Link to="/checkpoints/$id" params={{ id }}>{id}</Link>
                      </th>
                    ))}
                    <th scope="col" className="wide-only">Verdict</th>
                  </tr>
                </thead>
                <tbody>
                  <Rows facts={facts} all={all} />
                  <Rows facts={found.config} all={all} />
                </tbody>
              </table>
            </div>
          </>
        );
      }}
    </Loaded>
  );
}

export function CheckpointComparison() {
  const { a, b } = useSearch({ from: "/compare" });
  const navigate = useNavigate({ from: "/compare" });
  const sides = [["a", "A", a], ["b", "B", b]] as const;
  return (
    <>
      <div className="halves pickers">
        {sides.map(([key, side, id]) => (
          <Side key={key} side={side} id={id}
            pick={(chosen) => void navigate({ search: (old) => ({ ...old, [key]: chosen }) })} />
        ))}
      </div>
      {a && b ? <Outcome a={a} b={b} /> : (
        <Empty title="Choose two checkpoints">
          <p>Choose a run and a checkpoint for each side. Each line of an ancestry has a compare
            link, too.</p>
        </Empty>
      )}
    </>
  );
}
