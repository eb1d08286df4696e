// Live updates: the server's event stream, or polling if the stream does not work.
import { useQueryClient, type Query, type QueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { runOf } from "../format";
import { AwayError, BASE, onReach, probe } from "./client";
import { connectionOf, isFresh, type Connection, type Link } from "./link";
import { openStream, type News, type Stream } from "./stream";
import type { Ask } from "./streamWorker";

export type { Connection } from "./link";

const POLL_MS = 2_000;
const WATCH_MS = 1_000;
const GATHER_MS = 200;
const ROUND_MS = 1_000;
const LISTS_MS = 5_000;
const LATE_MS = 5_000;
const SILENT_EVENTS: ReadonlySet<string> = new Set(["open", "hello", "ping"]);

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

  constructor(private readonly client: QueryClient) {
    document.addEventListener("visibilitychange", this.wait);
  }

  add({ run, uid }: Change, isBeat: boolean) {
    const names = isBeat ? this.beats : this.changed;
    if (run) names.add(run);
    if (uid) names.add(uid);
    if (!run && !uid) this.all = true;
    this.wait();
  }

  stop() {
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.wait);
  }

  private wait = () => {
    const hasChanges = this.all || this.changed.size > 0 || this.beats.size > 0;
    // A tab that nobody sees requests what changed when it is shown again.
    if (this.timer !== undefined || !hasChanges || document.hidden) return;
    const next = Math.max(GATHER_MS, this.flushedAt + ROUND_MS - Date.now());
    this.timer = window.setTimeout(() => this.flush(), next);
  };

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

/** The newest event when the server sent this page, so that all data are at least as new. */
const SEEN =
  document.querySelector<HTMLMetaElement>('meta[name="event"]')?.content || undefined;

/** Subscribes to the stream of all tabs, or where a browser cannot share it, to an own one. */
function subscribe(tell: (news: News) => void): Pick<Stream, "reopen" | "close"> {
  const url = `${window.location.origin}${BASE}/events`;
  if (typeof SharedWorker === "undefined") return openStream(url, SEEN, tell);
  const worker = new SharedWorker(new URL("./streamWorker.ts", import.meta.url), {
    type: "module",
  });
  const { port } = worker;
  let own: Stream | undefined;
  worker.onerror = () => {
    own ??= openStream(url, undefined, tell);
  };
  port.onmessage = ({ data }: MessageEvent<News>) => tell(data);
  const ask = (what: Ask) => port.postMessage(what);
  ask({ url, after: SEEN });
  return {
    reopen: () => (own ? own.reopen() : ask("again")),
    close: () => {
      own?.close();
      port.close();
    },
  };
}

function listen(client: QueryClient): () => void {
  const invalidator = new Invalidator(client);
  const tell = ({ name, data, after }: News) => {
    if (name === "failed") {
      const wasOpen = link.isOpen;
      update({ isOpen: false, hasFailed: true });
      // Request everything once now. The answers start the polling.
      if (wasOpen) invalidator.add({}, false);
      return;
    }
    update({ isOpen: true, hasFailed: false, heardAt: Date.now() });
    // Events before the stream opened may be unknown, so everything may have changed.
    if (name === "open" && (after === undefined || after !== SEEN)) invalidator.add({}, false);
    if (!SILENT_EVENTS.has(name)) invalidator.add(read(data), name === "beat");
  };
  const stream = subscribe(tell);
  // A frozen or disconnected server does not close the stream, so detect its silence.
  const watch = window.setInterval(() => {
    if (!link.isOpen || isFresh(link, Date.now())) return;
    update({ isOpen: false, hasFailed: true, answered: null });
    void probe();
    stream.reopen();
  }, WATCH_MS);
  return () => {
    stream.close();
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
