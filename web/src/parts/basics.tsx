// Basic components: states, times, facts, empty places and problems.
import { createContext, useContext, useEffect, useState, type ReactNode } from "react";
import { ApiError, AwayError } from "../api/client";
import { useConnection } from "../api/live";
import { serverTime } from "../clock";
import { exact, relative, when } from "../format";
import { lookOf, plain, type Shape as ShapeName } from "../states";

const SHAPES: Record<ShapeName, ReactNode> = {
  dot: <circle cx="6" cy="6" r="4.5" fill="currentColor" />,
  ring: <circle cx="6" cy="6" r="4" fill="none" stroke="currentColor" strokeWidth="1.8" />,
  check: <path d="M1.5 6.5l3 3 6-7" fill="none" stroke="currentColor" strokeWidth="2.2" />,
  cross: <path d="M2 2l8 8M10 2l-8 8" fill="none" stroke="currentColor" strokeWidth="2.2" />,
  bars: <path d="M3.5 1.5v9M8.5 1.5v9" fill="none" stroke="currentColor" strokeWidth="2.4" />,
  down: <path d="M1 2.5h10L6 11z" fill="currentColor" />,
  diamond: <path d="M6 .5L11.5 6 6 11.5.5 6z" fill="currentColor" />,
  copies: (
    <g fill="none" stroke="currentColor" strokeWidth="1.5">
      <path d="M3.5 8.5h-2v-7h7v2" />
      <rect x="4" y="4" width="7" height="7" />
    </g>
  ),
  slash: (
    <g fill="none" stroke="currentColor" strokeWidth="1.6">
      <circle cx="6" cy="6" r="4.4" />
      <path d="M3 9l6-6" />
    </g>
  ),
};

/** The shape of a state in its colour. Show the state's name beside it. */
export function Shape({ state }: { state: string }) {
  const [tone, shape] = lookOf(state);
  const pulse = state === "running" ? " pulse" : "";
  return (
    <svg width="12" height="12" viewBox="0 0 12 12" aria-hidden className={`tone-${tone}${pulse}`}>
      {SHAPES[shape]}
    </svg>
  );
}

/** A state: its shape in its colour, and its name. */
export function State({ state, children }: { state: string; children?: ReactNode }) {
  return (
    <span className="state">
      <Shape state={state} />
      <span>{children ?? plain(state)}</span>
    </span>
  );
}

const Clock = createContext(serverTime());
const TICK_MS = 1000;

/** One clock for the page, so that all relative times are consistent. */
export function ClockProvider({ children }: { children: ReactNode }) {
  const [now, setNow] = useState(() => serverTime());
  useEffect(() => {
    const timer = setInterval(() => setNow(serverTime()), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  return <Clock.Provider value={now}>{children}</Clock.Provider>;
}

export const useNow = (): number => useContext(Clock);

/** The time up to which the page knows the runs: now, or when the server last answered. */
export function useKnownNow(): number {
  const { connection, since } = useConnection();
  const now = useNow();
  return connection === "away" ? Math.min(now, serverTime(since)) : now;
}

/** A time relative to now, with the exact time as a tooltip and for assistive technology. */
export function Time({ at }: { at: string | null | undefined }) {
  const now = useNow();
  const then = when(at);
  if (then === null) return <span className="muted">–</span>;
  return (
    <time dateTime={at ?? undefined} title={exact(then)} className="nowrap">
      {relative(then, now)}
    </time>
  );
}

/** A definition list of the facts that have a value. */
export function Facts({ facts }: { facts: [string, ReactNode][] }) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return (
    <dl className="facts">
      {known.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A sentence of the server, with the commands that it names between backticks. */
export function Said({ text }: { text: string }) {
  return text.split("`").map((part, place) =>
    place % 2 === 1 ? <code key={place}>{part}</code> : part);
}

/** A placeholder for missing content: why there is none, and what to do. */
export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className="empty">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

/** The error of a request, with the server's message. */
export function Problem({ error, title }: { error: unknown; title?: string | undefined }) {
  const text = error instanceof Error ? error.message : String(error);
  const own = error instanceof ApiError ? error.title
    : error instanceof AwayError ? "No response." : "Unexpected error.";
  return (
    <div className="problem" role="alert">
      <strong>{title ?? own}</strong>
      <p>{text}</p>
    </div>
  );
}

interface Asked<T> {
  data: T | undefined;
  error: unknown;
}

/** Renders the data of a query, or its error if there is no data. */
export function Loaded<T>({ query, children }: {
  query: Asked<T>;
  children: (data: T) => ReactNode;
}) {
  // Old data is better than an error. The banner shows its age.
  if (query.data !== undefined) return <>{children(query.data)}</>;
  if (query.error) return <Problem error={query.error} />;
  return <p className="loading" role="status">Loading…</p>;
}

/** A command line with a button that copies it. */
export function Copy({ text, label }: { text: string; label: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return (
    <div className="copy">
      <div tabIndex={0} role="group" aria-label={label}><code>{text}</code></div>
      <button type="button" onClick={() => void copy()} aria-label={`Copy: ${label}`}>
        {copied ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

/** Sets the window's title. */
export function useTitle(title: string) {
  useEffect(() => {
    document.title = `${title} · Holdfast`;
  }, [title]);
}
