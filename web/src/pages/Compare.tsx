// Two checkpoints side by side: what differs in code, data, environment, size and outcome.
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { useComparison } from "../api/queries";
import { bytes, count, exact, figure, span, when } from "../format";
import { Empty, Loaded, useTitle } from "../parts/basics";
import { plain } from "../states";

const SIZES = new Set(["bytes"]);
const SPANS = /_s$/;
const TIMES = /_at$/;

/** A fact as text; digests stay whole, since telling them apart is the point. */
function show(name: string, value: unknown): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") {
    if (SIZES.has(name)) return bytes(value);
    if (SPANS.test(name)) return span(value);
    return Number.isInteger(value) ? count(value) : figure(value);
  }
  if (typeof value === "string" && TIMES.test(name)) return exact(when(value) ?? 0);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

interface Row {
  name: string;
  a: unknown;
  b: unknown;
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** The facts of two things by name, nested ones by their path. */
function rowsOf(a: Record<string, unknown>, b: Record<string, unknown>, prefix = ""): Row[] {
  const names = [...new Set([...Object.keys(a), ...Object.keys(b)])];
  return names.flatMap((name): Row[] => {
    const [left, right] = [a[name], b[name]];
    const path = prefix ? `${prefix}.${name}` : name;
    if (isObject(left) || isObject(right)) {
      return rowsOf(isObject(left) ? left : {}, isObject(right) ? right : {}, path);
    }
    return [{ name: path, a: left, b: right }];
  });
}

const differs = (row: Row): boolean => JSON.stringify(row.a) !== JSON.stringify(row.b);

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
            placeholder="run:step-00001000.a0001.i01"
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
      {(told) => {
        const rows = rowsOf(told.a, told.b);
        const different = rows.filter(differs);
        return (
          <>
            <div className="toolbar">
              <span>{different.length} of {rows.length} facts differ.</span>
              <label>
                <input type="checkbox" checked={all}
                  onChange={(event) => setAll(event.target.checked)} />
                Show what is the same, too
              </label>
            </div>
            <div className="table-wrap" tabIndex={0} role="region" aria-label="Comparison">
              <table>
                <thead>
                  <tr>
                    <th scope="col">Fact</th>
                    {[a, b].map((id) => (
                      <th key={id} scope="col">
                        <Link to="/checkpoints/$id" params={{ id }}>{id}</Link>
                      </th>
                    ))}
                  </tr>
                </thead>
                <tbody>
                  {(all ? rows : different).map((row) => (
                    <tr key={row.name} className={differs(row) ? "differs" : undefined}>
                      <td>{plain(row.name)}</td>
                      <td className="prose">{show(row.name, row.a)}</td>
                      <td className="prose">{show(row.name, row.b)}</td>
                    </tr>
                  ))}
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
        <Empty title="Two checkpoints are needed">
          <p>Their ids are on the page of each; in an ancestry, each line has a link to compare.</p>
        </Empty>
      )}
    </>
  );
}
