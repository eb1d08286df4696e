// Small charts for table cells: use of time, progress and loss.
import { count, percent, span } from "../format";
import { PARTS, PART_WORDS, type Part } from "../states";

export type Parts = Partial<Record<`${Part}_s`, number>> & { total_s?: number; ettr?: number };

const shares = (parts: Parts): [Part, number][] => {
  const all = PARTS.map((part): [Part, number] => [part, parts[`${part}_s`] ?? 0]);
  const total = all.reduce((sum, [, seconds]) => sum + seconds, 0);
  return total > 0 ? all.filter(([, s]) => s > 0).map(([part, s]) => [part, s / total]) : [];
};

/** A run's time by part as one bar. Its label has the numbers. */
export function GoodputBar({ parts }: { parts: Parts }) {
  const found = shares(parts);
  if (found.length === 0) return <span className="muted">–</span>;
  const label = found.map(([part, share]) => `${PART_WORDS[part]} ${percent(share)}`).join(", ");
  return (
    <div className="bar-parts" role="img" aria-label={label} title={label}>
      {found.map(([part, share]) => (
        <span key={part} className={`part-${part}`} style={{ width: `${share * 100}%` }} />
      ))}
    </div>
  );
}

export function PartLegend({ parts }: { parts: Parts }) {
  return (
    <ul className="legend">
      {shares(parts).map(([part, share]) => (
        <li key={part}>
          <span className={`swatch part-${part}`} aria-hidden />
          {PART_WORDS[part]} {span(parts[`${part}_s`])} ({percent(share)})
        </li>
      ))}
    </ul>
  );
}

/** The step, the total number of steps and the time left. */
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
      </span>{" "}
      {eta ? <span className="muted nowrap">· {span(eta)} left</span> : null}
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

/** A curve without axes. */
export function Spark({ values, label }: { values: number[]; label: string }) {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return <span className="muted">–</span>;
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  const x = (index: number) => (index / (finite.length - 1)) * (WIDTH - 2) + 1;
  const y = (value: number) =>
    HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4);
  const path = finite.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  return (
    <svg className="spark" width={WIDTH} height={HEIGHT} role="img" aria-label={label}>
      <polyline points={path} fill="none" stroke="currentColor" strokeWidth="1.5" />
    </svg>
  );
}
