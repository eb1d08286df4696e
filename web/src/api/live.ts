// Live updates: the server's event stream, or polling if the stream does not work.
import { useQueryClient, type Query, type QueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { runOf } from "../format";
import { AwayError, BASE, onReach, probe } from "./client";
import { connectionOf, isFresh, type Connection, type Link } from "./link";

export type { Connection } from "./link";

const POLL_MS = 2_000;
const TRY_AGAIN_MS = 5_000;
const WATCH_MS = 1_000;
const GATHER_MS = 200;
const ROUND_MS = 1_000;
const LISTS_MS = 5_000;
const LATE_MS = 5_000;
// EventSource does not report comments, so the server's keep-alive is a named event.
const EVENTS = ["hello", "ping", "journal", "run", "beat", "reset"] as const;
const SILENT_EVENTS: ReadonlySet<string> = new Set(["hello", "ping"]);

const link: Link = { isOpen: false, hasFailed: false, heardAt: Date.now(), answered: null };
let answeredAt = Date.now();
let current: { connection: Connection; since: number } = {
  connection: "connecting",
  since: Date.now(),
};
const listeners = new Set<() => void>();

/** Updates the connection, and notifies the listeners if its status changed. */
function update(change: Partial<Link>) {
  Object.assign(link, change);
  const now = Date.now();
  const connection = connectionOf(link, now);
  if (connection === current.connection) return;
  // An unreachable server last responded before the page noticed.
  const since = connection === "away" ? Math.max(link.heardAt, answeredAt) : now;
  current = { connection, since };
  for (const listener of listeners) listener();
}

/** The connection status, and since when it holds. */
export function useConnection() {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => current,
  );
}

/** The polling interval of a query: none while the stream works and the query has an answer. */
export const pollMs = (query: { state: { error: unknown } }): number | false =>
  current.connection === "live" && !(query.state.error instanceof AwayError) ? false : POLL_MS;

interface Change {
  run?: string;
  uid?: string;
}

// A heartbeat changes these views of its run, and the list of runs. Journal lines and states change
// all views of a run.
const CHANGED_BY_BEATS = new Set(["show", "heartbeats", "metrics"]);
const NEVER_CHANGED = new Set(["session", "compare", "filters", "series"]);

/** Invalidates queries whose data changed. Many changes at once cost one round of requests. */
class Invalidator {
  private changed = new Set<string>();
  private beats = new Set<string>();
  private all = false;
  private timer: number | undefined;
  private flushedAt = 0;
  private listedAt = 0;

  constructor(private readonly client: QueryClient) {}

  add({ run, uid }: Change, isBeat: boolean) {
    const names = isBeat ? this.beats : this.changed;
    if (run) names.add(run);
    if (uid) names.add(uid);
    if (!run && !uid) this.all = true;
    this.wait();
  }

  stop() {
    clearTimeout(this.timer);
  }

  private wait() {
    if (this.timer !== undefined) return;
    const next = Math.max(GATHER_MS, this.flushedAt + ROUND_MS - Date.now());
    this.timer = window.setTimeout(() => this.flush(), next);
  }

  private flush() {
    this.timer = undefined;
    const late = Date.now() - this.flushedAt > LATE_MS;
    // A running request may have missed the change, but restarting it each time would starve it.
    if (this.client.isFetching() > 0 && !late) {
      this.timer = window.setTimeout(() => this.flush(), GATHER_MS);
      return;
    }
    const { changed, beats, all } = this;
    this.changed = new Set();
    this.beats = new Set();
    this.all = false;
    this.flushedAt = Date.now();
    // Many live runs send heartbeats all the time, so the list of runs is updated less often.
    const listed = beats.size > 0 && this.flushedAt - this.listedAt >= LISTS_MS;
    if (listed || changed.size > 0 || all) this.listedAt = this.flushedAt;
    const predicate = ({ queryKey: [kind, name, view] }: Query) => {
      if (NEVER_CHANGED.has(String(kind))) return false;
      if (all) return true;
      if (kind === "run") {
        return changed.has(String(name)) ||
          (beats.has(String(name)) && CHANGED_BY_BEATS.has(String(view)));
      }
      if (kind === "checkpoint") return changed.has(runOf(String(name)));
      return changed.size > 0 || (listed && kind === "runs");
    };
    void this.client.invalidateQueries({ predicate }, { cancelRefetch: false });
  }
}

function read(data: string): Change {
  try {
    return JSON.parse(data) as Change;
  } catch {
    return {};
  }
}

function listen(client: QueryClient): () => void {
  const invalidator = new Invalidator(client);
  let source: EventSource | null = null;
  let again: number | undefined;
  const connect = () => {
    source?.close();
    source = new EventSource(`${BASE}/events`);
    source.onopen = () => {
      update({ isOpen: true, hasFailed: false, heardAt: Date.now() });
      // Events before the stream opened are unknown, so everything may have changed.
      invalidator.add({}, false);
    };
    for (const name of EVENTS) {
      source.addEventListener(name, (message: MessageEvent<string>) => {
        update({ heardAt: Date.now() });
        if (!SILENT_EVENTS.has(name)) invalidator.add(read(message.data), name === "beat");
      });
    }
    source.onerror = () => {
      const wasOpen = link.isOpen;
      update({ isOpen: false, hasFailed: true });
      // Request everything once now. The answers start the polling.
      if (wasOpen) invalidator.add({}, false);
      if (source?.readyState !== EventSource.CLOSED) return;
      clearTimeout(again);
      again = window.setTimeout(connect, TRY_AGAIN_MS);
    };
  };
  connect();
  // A frozen or disconnected server does not close the stream, so detect its silence.
  const watch = window.setInterval(() => {
    if (!link.isOpen || isFresh(link, Date.now())) return;
    update({ isOpen: false, hasFailed: true, answered: null });
    void probe();
    connect();
  }, WATCH_MS);
  return () => {
    source?.close();
    clearTimeout(again);
    clearInterval(watch);
    invalidator.stop();
  };
}

/** Listens while the page is open. Call it once, near the root. */
export function useLive() {
  const client = useQueryClient();
  useEffect(() => {
    const unsubscribe = onReach((reached) => {
      if (reached) answeredAt = Date.now();
      update({ answered: reached });
    });
    const stop = listen(client);
    return () => {
      unsubscribe();
      stop();
    };
  }, [client]);
}
