// Where time went, how far a run is, and how its loss goes, each in the space of a table's cell.
import { count, percent, span } from "../format";
import { PARTS, PART_WORDS, type Part } from "../states";

export type Parts = Partial<Record<`${Part}_s`, number>> & { total_s?: number; ettr?: number };

const shares = (parts: Parts): [Part, number][] => {
  const told = PARTS.map((part): [Part, number] => [part, parts[`${part}_s`] ?? 0]);
  const total = told.reduce((sum, [, seconds]) => sum + seconds, 0);
  return total > 0 ? told.filter(([, s]) => s > 0).map(([part, s]) => [part, s / total]) : [];
};

/** One bar: every second of a run in one part; the numbers are in its label. */
export function GoodputBar({ parts }: { parts: Parts }) {
  const told = shares(parts);
  if (told.length === 0) return <span className="muted">–</span>;
  const words = told.map(([part, share]) => `${PART_WORDS[part]} ${percent(share)}`).join(", ");
  return (
    <div className="bar-parts" role="img" aria-label={words} title={words}>
      {told.map(([part, share]) => (
        <span key={part} className={`part-${part}`} style={{ width: `${share * 100}%` }} />
      ))}
    </div>
  );
}

export function PartLegend({ parts }: { parts: Parts }) {
  const told = shares(parts);
  return (
    <ul className="legend">
      {told.map(([part, share]) => (
        <li key={part}>
          <span className={`swatch part-${part}`} aria-hidden />
          {PART_WORDS[part]} {span(parts[`${part}_s`])} ({percent(share)})
        </li>
      ))}
    </ul>
  );
}

/** Steps done of steps wanted, and when it is through at the present pace. */
export function Progress({ step, total, eta }: {
  step: number | null;
  total?: number | null;
  eta?: number | null;
}) {
  if (step === null) return <span className="muted">no step yet</span>;
  const share = total ? Math.min(1, step / total) : null;
  return (
    <div>
      <span className="nowrap">
        {count(step)}
        {total ? <span className="muted"> of {count(total)}</span> : null}
        {eta ? <span className="muted wide-only"> · {span(eta)} left</span> : null}
      </span>
      {share === null ? null : (
        <div
          className="progress"
          role="progressbar"
          aria-label="steps"
          aria-valuenow={Math.round(share * 100)}
          aria-valuemin={0}
          aria-valuemax={100}
        >
          <span style={{ width: `${share * 100}%` }} />
        </div>
      )}
    </div>
  );
}

const WIDTH = 96;
const HEIGHT = 22;

/** The shape of a curve without axes; the last value stands beside it. */
export function Spark({ values, label }: { values: number[]; label: string }) {
  const told = values.filter(Number.isFinite);
  if (told.length < 2) return <span className="muted">–</span>;
  const low = Math.min(...told);
  const high = Math.max(...told);
  const x = (index: number) => (index / (told.length - 1)) * (WIDTH - 2) + 1;
  const y = (value: number) =>
    HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4);
  const path = told.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  return (
    <svg className="spark" width={WIDTH} height={HEIGHT} role="img" aria-label={label}>
      <polyline points={path} fill="none" stroke="currentColor" strokeWidth="1.5" />
    </svg>
  );
}
