// Comparison of two checkpoints: code, data, environment, size and metrics.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { useComparison } from "../api/queries";
import type { Fact } from "../api/types";
import { bytes, checkpointWords, count, exact, figure, span, when } from "../format";
import { Empty, Facts, Loaded, useTitle } from "../parts/basics";
import { plain } from "../states";

const SIZES = new Set(["bytes"]);
const SPANS = /(?<!_per)_s$/;
const TIMES = /_at$/;

/** The text of a fact, with complete digests. */
function show(name: string, value: unknown): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") {
    if (SIZES.has(name)) return bytes(value);
    if (SPANS.test(name)) return span(value);
    return Number.isInteger(value) ? count(value) : figure(value);
  }
  if (typeof value !== "string") return JSON.stringify(value);
  return TIMES.test(name) ? exact(when(value) ?? 0) : value;
}

const hasValue = (value: unknown): boolean => value !== null && value !== undefined && value !== "";

function Rows({ facts, all }: { facts: Fact[]; all: boolean }) {
  return facts
    .filter((fact) => all || (!fact.is_same && (hasValue(fact.one) || hasValue(fact.other))))
    .map(({ name, one, other, is_same: same }) => (
      <tr key={name} className={same === false ? "differs" : undefined}>
        <td>{plain(name)}</td>
        <td className="prose breaks">{show(name, one)}</td>
        <td className="prose breaks">{show(name, other)}</td>
        <td className="nowrap wide-only">
          {same === null ? "unknown" : same ? "same" : "differs"}
        </td>
      </tr>
    ));
}

function Choose({ a, b }: { a?: string; b?: string }) {
  const navigate = useNavigate({ from: "/compare" });
  const [left, setLeft] = useState(a ?? "");
  const [right, setRight] = useState(b ?? "");
  const fields = [
    ["A", left, setLeft],
    ["B", right, setRight],
  ] as const;
  return (
    <form
      className="toolbar"
      onSubmit={(event) => {
        event.preventDefault();
        void navigate({ search: { a: left.trim(), b: right.trim() } });
      }}
    >
      {fields.map(([name, value, set]) => (
        <label key={name}>
          {name}
          <input
            required
            size={36}
            placeholder="run:step-00001000.a0001.l01"
            value={value}
            onChange={(event) => set(event.target.value)}
          />
        </label>
      ))}
      <button type="submit">Compare</button>
    </form>
  );
}

function Outcome({ a, b }: { a: string; b: string }) {
  const query = useComparison(a, b);
  const [all, setAll] = useState(false);
  return (
    <Loaded query={query}>
      {(found) => {
        const facts = [...found.facts, ...found.metrics];
        const different = facts.filter((fact) => fact.is_same === false);
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
                ["Settings that differ", count(found.config.length)],
              ]}
            />
            <div className="toolbar">
              <label>
                <input type="checkbox" checked={all}
                  onChange={(event) => setAll(event.target.checked)} />
                Show identical
              </label>
            </div>
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Comparison">
              <table className="sides">
                <thead>
                  <tr>
                    <th scope="col">Fact</th>
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

export function Compare() {
  useTitle("Compare two checkpoints");
  const { a, b } = useSearch({ from: "/compare" });
  return (
    <>
      <div className="head"><h1>Compare two checkpoints</h1></div>
      <Choose key={`${a}|${b}`} a={a} b={b} />
      {a && b ? <Outcome a={a} b={b} /> : (
        <Empty title="Choose two checkpoints">
          <p>Each checkpoint's page shows its id. Each line of an ancestry has a compare link.</p>
        </Empty>
      )}
    </>
  );
}
