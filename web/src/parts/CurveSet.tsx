// The curves of one run, or of several on the same axes, and how they are drawn.
import { useMemo } from "react";
import { curvesFile } from "../api/comparing";
import type { Run, Series } from "../api/types";
import {
  columnOf, countersOf, inOrder, placeOfStep, STEP, stitch, TIME, TRAINING, type Curve,
} from "../curves";
import { useCurveView, zoomSearch, type CurveView } from "../curveView";
import { count, figure, when } from "../format";
import {
  axisWords, extentOf, placeWords, positive, rangeWords, smooth, type Range,
} from "../scales";
import { plain } from "../states";
import type { Mark } from "../story";
import { Chart } from "./Chart";
import type { Line } from "./chartOptions";

const WEIGHTS: [number, string][] = [
  [0, "none"], [0.5, "light"], [0.8, "medium"], [0.9, "strong"], [0.97, "very strong"],
];
const MARKS_OPEN_MAX = 6;

export interface Drawn {
  run: Pick<Run, "run" | "created_at">;
  series: Series[];
  /** The steps at which something happened to the run. */
  marks: Mark[];
}

const beganOf = ({ run }: Drawn): number => (when(run.created_at) ?? 0) / 1000;

/** Where the values of the curves come from, as files. */
function Files({ runs, name }: { runs: string[]; name?: string }) {
  const what = name ? plain(name) : "all curves";
  return (
    <span className="download">
      {["csv", "json"].map((format) => (
        <a key={format} download aria-label={`Download ${what} as ${format.toUpperCase()}`}
          href={curvesFile(runs, format, name && columnOf(name))}>{format.toUpperCase()}</a>
      ))}
    </span>
  );
}

function Toolbar({ view, runs, counters }: {
  view: CurveView;
  runs: string[];
  counters: string[];
}) {
  const { axis, isLog, weight, zoom, change } = view;
  const axes = [...new Set([STEP, ...counters, TIME, TRAINING, axis])];
  const weights = WEIGHTS.some(([one]) => one === weight) ? WEIGHTS
    : [...WEIGHTS, [weight, String(weight)] as [number, string]];
  return (
    <div className="toolbar" role="group" aria-label="How the curves are drawn">
      <label>
        Axis
        <select value={axis} onChange={({ target: { value } }) => change({
          x: value === STEP ? undefined : value, ...zoomSearch(null) })}>
          {axes.map((one) => <option key={one} value={one}>{axisWords(one)}</option>)}
        </select>
      </label>
      <label>
        Smoothing
        <select value={weight}
          onChange={({ target: { value } }) => change({ smooth: Number(value) || undefined })}>
          {weights.map(([one, words]) => <option key={one} value={one}>{words}</option>)}
        </select>
      </label>
      <label>
        <input type="checkbox" checked={isLog}
          onChange={({ target: { checked } }) => change({ log: checked || undefined })} />
        Log scale
      </label>
      {zoom ? (
        <button type="button" onClick={() => change(zoomSearch(null))}>
          Reset zoom
        </button>
      ) : null}
      {zoom ? (
        <span className="muted">{rangeWords(axis, zoom)}</span>
      ) : null}
      <Files runs={runs} />
    </div>
  );
}

interface Panel {
  name: string;
  lines: Line[];
  /** Values that a logarithmic axis cannot show. */
  hidden: number;
  isLog: boolean;
  last: number | null | undefined;
}

type Look = Pick<CurveView, "axis" | "isLog" | "weight">;

function lineOf({ x, y: given }: Curve, name: string, colour: number, look: Look): Line {
  const y = look.isLog ? positive(given) : given;
  return look.weight > 0
    ? { name, colour, x, y: smooth(y, look.weight), raw: y } : { name, colour, x, y };
}

/** One panel for each metric, with a line for each run that has it. */
function panelsOf(drawn: Drawn[], look: Look): Panel[] {
  const each = drawn.map((one) => stitch(one.series, look.axis, beganOf(one)));
  const names = inOrder(new Set(each.flat().map((curve) => curve.name)));
  return names.flatMap((name): Panel[] => {
    const found = each.flatMap((curves, index): [Curve, number][] => {
      const curve = curves.find((one) => one.name === name);
      return curve && curve.x.length > 1 ? [[curve, index]] : [];
    });
    if (found.length === 0) return [];
    const isLog = look.isLog &&
      found.some(([{ y }]) => y.some((value) => value !== null && value > 0));
    const lines = found.map(([curve, index]) =>
      lineOf(curve, drawn[index]?.run.run ?? "", index, { ...look, isLog }));
    const hidden = isLog ? found.flatMap(([{ y }]) => y)
      .filter((value) => value !== null && value <= 0).length : 0;
    return [{ name, lines, hidden, isLog, last: found[0]?.[0].y.at(-1) }];
  });
}

/** All marks of the curves as text. In a narrow plot, some labels have no room. */
function MarkList({ marks, axis }: { marks: Mark[]; axis: string }) {
  if (marks.length === 0) return null;
  return (
    <details className="marks" open={marks.length <= MARKS_OPEN_MAX}>
      <summary>Dashed lines: {count(marks.length)}</summary>
      <ul className="legend">
        {marks.map((one, index) => (
          <li key={`${one.x}${one.word}${index}`}>
            {axisWords(axis)} {placeWords(axis, one.x)}: {one.word}
          </li>
        ))}
      </ul>
    </details>
  );
}

function Heading({ panel, isOne }: { panel: Panel; isOne: boolean }) {
  const { name, hidden, isLog, last } = panel;
  return (
    <h3>
      {plain(name)}{" "}
      {isOne ? <strong>{last === null ? "not a finite number" : figure(last)}</strong> : null}
      {hidden > 0 ? (
        <span className="note">
          {" "}{hidden === 1 ? "1 value ≤ 0 is" : `${count(hidden)} values ≤ 0 are`} not drawn
        </span>
      ) : null}
      {isLog ? <span className="visually-hidden"> on a logarithmic scale</span> : null}
    </h3>
  );
}

/** The curves of `drawn`, the first of which is the run of the page. */
export function CurveSet({ drawn }: { drawn: Drawn[] }) {
  const view = useCurveView();
  const { axis, isLog, weight, zoom, change } = view;
  const panels = useMemo(
    () => panelsOf(drawn, { axis, isLog, weight }), [drawn, axis, isLog, weight]);
  const counters = useMemo(
    () => [...new Set(drawn.flatMap(({ series }) => countersOf(series)))], [drawn]);
  const marks = useMemo(() => drawn.flatMap((one) => one.marks.flatMap((mark): Mark[] => {
    const x = placeOfStep(one.series, mark.x, axis, beganOf(one));
    return x === null ? [] : [{ ...mark, x }];
  })), [drawn, axis]);
  const extent = useMemo(
    (): Range => extentOf(panels.flatMap((one) => one.lines)) ?? [0, 1], [panels]);
  const names = drawn.map(({ run }) => run.run);
  return (
    <>
      <Toolbar view={view} runs={names} counters={counters} />
      {panels.length === 0 ? (
        <p className="muted">No run has two points on this axis.</p>
      ) : null}
      <div className="curves">
        {panels.map((panel) => (
          <div key={panel.name}>
            <div className="curve-head">
              <Heading panel={panel} isOne={drawn.length === 1} />
              <Files runs={names} name={panel.name} />
            </div>
            <Chart lines={panel.lines} label={plain(panel.name)} axis={axis} isLog={panel.isLog}
              marks={marks} zoom={zoom} extent={extent}
              onZoom={(range) => change(zoomSearch(range))} />
          </div>
        ))}
        <MarkList marks={marks} axis={axis} />
      </div>
    </>
  );
}
