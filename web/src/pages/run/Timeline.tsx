// The attempts of a run against time: what each did when, and why it ended.
import { useLayoutEffect, useRef, useState } from "react";
import type { Attempt, Checkpoint } from "../../api/types";
import { Empty, State, Time, useNow } from "../../parts/basics";
import { count, exact, span, when } from "../../format";
import { PART_WORDS, PARTS, plain } from "../../states";
import { segmentsOf, ticks } from "../../timeline";

const ROW = 24;
const LEFT = 96;
const TOP = 8;
const AXIS = 22;
const TICK_PX = 130;
const MARK_PX = 8;

function useWidth() {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(800);
  useLayoutEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => setWidth(Math.max(280, element.clientWidth)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [place, width] as const;
}

const clock = (time: number, wide: boolean): string => {
  const text = exact(time);
  return wide ? text.slice(5, 16) : text.slice(11, 19);
};

/** An attempt's checkpoints and where each stands; of those that would overlap, the newest. */
function thinned(
  checkpoints: Checkpoint[],
  attempt: number,
  x: (time: number) => number,
): [Checkpoint, number][] {
  let free = Number.POSITIVE_INFINITY;
  return checkpoints.flatMap((one): [Checkpoint, number][] => {
    const at = one.attempt === attempt ? when(one.committed_at) : null;
    const left = at === null ? Number.NaN : Math.round(x(at));
    // Newest first, so places go down; one without a time has no place.
    if (!(left >= LEFT && left <= free)) return [];
    free = left - MARK_PX;
    return [[one, left]];
  });
}

interface Props {
  attempts: Attempt[];
  checkpoints: Checkpoint[];
}

export function Timeline({ attempts, checkpoints }: Props) {
  const now = useNow();
  const [place, width] = useWidth();
  const rows = attempts.map((attempt) => ({ attempt, segments: segmentsOf(attempt, now) }));
  const all = rows.flatMap((row) => row.segments);
  if (all.length === 0) {
    return (
      <Empty title="No attempt has begun yet">
        <p>The time line starts when the scheduler has taken the first one.</p>
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
        role="img"
        aria-label={`${rows.length} attempts in ${span((to - from) / 1000)}; the table below tells`}
      >
        <g className="axis">
          {marks.map((mark) => (
            <g key={mark}>
              <line x1={x(mark)} x2={x(mark)} y1={TOP} y2={height - AXIS + 4} />
              <text x={x(mark)} y={height - 5} textAnchor="middle">
                {clock(mark, to - from > 86_400_000)}
              </text>
            </g>
          ))}
        </g>
        {rows.map(({ attempt, segments }, row) => (
          <g key={attempt.number} transform={`translate(0 ${TOP + row * ROW})`}>
            <text x={0} y={ROW / 2 + 4}>
              #{attempt.number} · {attempt.world_size} GPU{attempt.world_size === 1 ? "" : "s"}
            </text>
            {segments.map((one) => (
              <rect
                key={`${one.part}${one.from}`}
                className={`part-${one.part}`}
                x={x(one.from)}
                width={Math.max(1.5, x(one.to) - x(one.from))}
                y={4}
                height={ROW - 9}
                rx={2}
              >
                <title>
                  {`${PART_WORDS[one.part]}: ${span((one.to - one.from) / 1000)}, ` +
                    `from ${exact(one.from)}`}
                </title>
              </rect>
            ))}
            {thinned(checkpoints, attempt.number, x).map(([one, left]) => (
              <path key={one.id} className="checkpoint" d={`M${left} ${ROW - 7}l3.5 6h-7z`}>
                <title>{`checkpoint of step ${count(one.step)}, ${one.state}`}</title>
              </path>
            ))}
          </g>
        ))}
      </svg>
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

/** Each attempt in words: where it began, how far it came, and what ended it by which evidence. */
export function Attempts({ attempts }: { attempts: Attempt[] }) {
  const newest = attempts.toReversed();
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Attempts">
      <table>
        <thead>
          <tr>
            <th scope="col">Attempt</th>
            <th scope="col">Ended as</th>
            <th scope="col" className="wide-only">Why</th>
            <th scope="col" className="number">Steps</th>
            <th scope="col" className="wide-only">Nodes</th>
            <th scope="col" className="number wide-only">Signal to commit</th>
            <th scope="col" className="number wide-only">Began</th>
            <th scope="col" className="number wide-only">Lasted</th>
          </tr>
        </thead>
        <tbody>{newest.map((one) => <AttemptRow key={one.number} attempt={one} />)}</tbody>
      </table>
    </div>
  );
}

function lasted(attempt: Attempt, now: number): number | null {
  const from = when(attempt.started_at);
  return from === null ? null : ((when(attempt.ended_at) ?? now) - from) / 1000;
}

function AttemptRow({ attempt }: { attempt: Attempt }) {
  const now = useNow();
  const why = attempt.cause ? plain(attempt.cause) : (attempt.reason ?? "");
  const evidence = attempt.evidence.join("; ");
  return (
    <tr>
      <td className="nowrap">
        #{attempt.number}
        <div className="second">
          {attempt.world_size} GPU{attempt.world_size === 1 ? "" : "s"}
          {attempt.job_id ? ` · job ${attempt.job_id}` : ""}
        </div>
      </td>
      <td>
        <State state={attempt.state} />
        <div className="second narrow-only">{why}</div>
      </td>
      <td className="wide-only">
        {why}
        <div className="second">{evidence}</div>
        {attempt.traceback ? (
          <details>
            <summary>Traceback of rank {attempt.failed_rank ?? "?"}</summary>
            <pre className="log">{attempt.traceback}</pre>
          </details>
        ) : null}
      </td>
      <td className="number">
        {count(attempt.first_step)} – {attempt.last_step === null && attempt.ended_at === null
          ? "…" : count(attempt.last_step)}
        <div className="second">committed {count(attempt.committed_step)}</div>
      </td>
      <td className="wide-only clip" title={attempt.nodes.join(", ")}>
        {attempt.nodes.join(", ")}
      </td>
      <td className="number wide-only">{span(attempt.signal_to_commit_s)}</td>
      <td className="number wide-only">
        <Time at={attempt.started_at ?? attempt.submitted_at} />
      </td>
      <td className="number wide-only">{span(lasted(attempt, now))}</td>
    </tr>
  );
}
