// The attempts of a run as a timeline and as a table.
import { useCallback, useState, type KeyboardEvent } from "react";
import type { Attempt, Checkpoint, Run, Segment } from "../../api/types";
import { Empty, State, Time, useKnownNow } from "../../parts/basics";
import { count, dayAndTime, exact, secondOfDay, span, when } from "../../format";
import { PART_WORDS, PARTS } from "../../states";
import { endOf, gpus, reasonOf, restartsOf, startOf } from "../../story";
import { segmentsOf, ticks, type Drawn } from "../../timeline";

const ROW = 24;
const LEFT = 96;
const TOP = 8;
const AXIS = 22;
const TICK_PX = 130;
const MARK_PX = 8;

/** A ref and the width of its element; 0 before the element exists. */
function useWidth() {
  const [width, setWidth] = useState(0);
  const place = useCallback((element: HTMLDivElement) => {
    const measure = () => setWidth(Math.max(280, element.clientWidth));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [place, width] as const;
}

/** An attempt's checkpoints and their positions. Of overlapping ones, the newest is kept. */
function thinned(
  checkpoints: Checkpoint[],
  attempt: number,
  x: (time: number) => number,
): [Checkpoint, number][] {
  let free = Number.POSITIVE_INFINITY;
  return checkpoints.flatMap((one): [Checkpoint, number][] => {
    const at = one.attempt === attempt ? when(one.committed_at) : null;
    const left = at === null ? Number.NaN : Math.round(x(at));
    // The checkpoints are newest first, so positions decrease. One without a time is skipped.
    if (!(left >= LEFT && left <= free)) return [];
    free = left - MARK_PX;
    return [[one, left]];
  });
}

/** "attempt 2, productive: 5 min, from …". */
const wordsOf = ({ attempt, part, from, to }: Drawn): string =>
  `attempt ${attempt}, ${PART_WORDS[part]}: ${span((to - from) / 1000)}, from ${exact(from)}`;

/** The parts of an attempt's time. */
function Bars({ segments, chosen, x }: {
  segments: Drawn[];
  chosen: Drawn | undefined;
  x: (time: number) => number;
}) {
  return segments.map((one) => (
    <rect
      key={`${one.part}${one.from}`}
      className={one === chosen ? `part-${one.part} chosen` : `part-${one.part}`}
      x={x(one.from)}
      width={Math.max(1.5, x(one.to) - x(one.from))}
      y={4}
      height={ROW - 9}
      rx={2}
    >
      <title>{wordsOf(one)}</title>
    </rect>
  ));
}

interface Props {
  attempts: Attempt[];
  segments: Segment[];
  checkpoints: Checkpoint[];
}

export function Timeline({ attempts, segments, checkpoints }: Props) {
  const now = useKnownNow();
  const [place, width] = useWidth();
  const rows = attempts.map((attempt) => (
    { attempt, segments: segmentsOf(attempt, segments, now) }));
  const all = rows.flatMap((row) => row.segments);
  const [at, setAt] = useState(-1);
  const press = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(all.length - 1, at + by)));
  };
  const chosen = all[at];
  if (all.length === 0) {
    return (
      <Empty title="No attempt yet">
        <p>The timeline starts when the scheduler accepts the first attempt.</p>
      </Empty>
    );
  }
  const from = Math.min(...all.map((one) => one.from));
  const to = Math.max(...all.map((one) => one.to), from + 1000);
  const x = (time: number) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 12);
  const height = TOP + rows.length * ROW + AXIS;
  const marks = ticks(from, to, Math.max(2, Math.floor((width - LEFT) / TICK_PX)))
    .filter((mark) => x(mark) < width - TICK_PX / 3);
  const used = PARTS.filter((part) => all.some((one) => one.part === part));
  return (
    <div ref={place}>
      <svg
        className="timeline"
        height={height}
        width={width}
        tabIndex={0}
        role="application"
        onKeyDown={press}
        onBlur={() => setAt(-1)}
        aria-label={`${rows.length} attempts in ${span((to - from) / 1000)}. The arrow keys go `
          + "through the parts; see the table below."}
      >
        <g className="axis">
          {marks.map((mark) => (
            <g key={mark}>
              <line x1={x(mark)} x2={x(mark)} y1={TOP} y2={height - AXIS + 4} />
              <text x={x(mark)} y={height - 5} textAnchor="middle">
                {to - from > 86_400_000 ? dayAndTime(mark) : secondOfDay(mark)}
              </text>
            </g>
          ))}
        </g>
        {rows.map(({ attempt, segments }, row) => (
          <g key={attempt.number} transform={`translate(0 ${TOP + row * ROW})`}>
            <text x={0} y={ROW / 2 + 4}>
              #{attempt.number} · {gpus(attempt.gpus)}
            </text>
            <Bars segments={segments} chosen={chosen} x={x} />
            {thinned(checkpoints, attempt.number, x).map(([one, left]) => (
              <path key={one.id} className="checkpoint" d={`M${left} ${ROW - 7}l3.5 6h-7z`}>
                <title>{`checkpoint of step ${count(one.step)}, ${one.state}`}</title>
              </path>
            ))}
          </g>
        ))}
      </svg>
      <output className="muted">{chosen ? wordsOf(chosen) : ""}</output>
      <ul className="legend">
        {used.map((part) => (
          <li key={part}>
            <span className={`swatch part-${part}`} aria-hidden />
            {PART_WORDS[part]}
          </li>
        ))}
        {checkpoints.length > 0 ? <li>▲ checkpoint committed</li> : null}
      </ul>
    </div>
  );
}

/** The table of attempts: their steps, and why each one ended, with the evidence. */
export function Attempts({ attempts, run }: { attempts: Attempt[]; run: Run }) {
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Attempts">
      <table>
        <thead>
          <tr>
            <th scope="col">Attempt</th>
            <th scope="col">Status</th>
            <th scope="col" className="wide-only">Reason</th>
            <th scope="col" className="number">Steps</th>
            <th scope="col" className="wide-only">Nodes</th>
            <th scope="col" className="number roomy-only">Signal to commit</th>
            <th scope="col" className="number wide-only">Started</th>
            <th scope="col" className="number wide-only">Duration</th>
          </tr>
        </thead>
        <tbody>
          {attempts.toReversed().map((one) => (
            <AttemptRow key={one.number} attempt={one} run={run} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

const COLUMNS = 8;

function durationOf(attempt: Attempt, now: number): number | null {
  const from = when(attempt.started_at);
  return from === null ? null : ((when(attempt.ended_at) ?? now) - from) / 1000;
}

function stepsOf({ first_step: first, last_step: last, ended_at: ended }: Attempt): string {
  if (first === null && last === null) return "—";
  return `${count(first)} – ${last === null && ended === null ? "…" : count(last)}`;
}

/** The evidence for an attempt's end, in a row as wide as the table. */
function Evidence({ attempt, run }: { attempt: Attempt; run: Run }) {
  const isLast = attempt.number === run.attempts.at(-1)?.number;
  // The head of the page has the run's reason, which is the evidence of its last attempt.
  const evidence = attempt.evidence.filter((line) => !isLast || !run.reason?.includes(line));
  // A live attempt has its reason in a column.
  const start = attempt.cause ? startOf(attempt) : "";
  const lines = [...(start ? [start] : []), ...restartsOf(attempt, run.crashes), ...evidence];
  if (lines.length === 0 && !attempt.traceback) return null;
  return (
    <tr className="more">
      <td colSpan={COLUMNS}>
        {lines.map((line) => <div key={line} className="second breaks">{line}</div>)}
        {attempt.traceback ? (
          <details open={isLast && attempt.state === "failed"}>
            <summary>Traceback of rank {attempt.failed_rank ?? "?"}</summary>
            <pre className="log" tabIndex={0} role="region"
              aria-label={`Traceback of attempt ${attempt.number}`}>{attempt.traceback}</pre>
          </details>
        ) : null}
      </td>
    </tr>
  );
}

function AttemptRow({ attempt, run }: { attempt: Attempt; run: Run }) {
  const { requests } = run;
  const now = useKnownNow();
  const why = reasonOf(attempt, requests);
  return (
    <>
      <tr className="with-more">
        <td className="nowrap">
          #{attempt.number}
          <div className="second">
            {gpus(attempt.gpus)}
            {attempt.job_id ? <span className="wide-only"> · job {attempt.job_id}</span> : ""}
          </div>
        </td>
        <td>
          <State state={endOf(attempt, requests)} />
          <div className="second narrow-only">{why}</div>
        </td>
        <td className="wide-only prose">{why}</td>
        <td className="number">
          {stepsOf(attempt)}
          <div className="second">
            {attempt.committed_step === null ? "none committed"
              : `committed ${count(attempt.committed_step)}`}
          </div>
        </td>
        <td className="wide-only clip" title={attempt.nodes.join(", ")}>
          {attempt.nodes.join(", ")}
        </td>
        <td className="number roomy-only">{span(attempt.signal_to_commit_s)}</td>
        <td className="number wide-only">
          <Time at={attempt.started_at ?? attempt.submitted_at} />
        </td>
        <td className="number wide-only">{span(durationOf(attempt, now))}</td>
      </tr>
      <Evidence attempt={attempt} run={run} />
    </>
  );
}
