// Live updates: the server's event stream, and polling where a stream does not come through.
import { useQueryClient, type Query, type QueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { runOf } from "../format";
import { AwayError, onReach, probe } from "./client";
import { connectionOf, isFresh, type Connection, type Link } from "./link";

export type { Connection } from "./link";

const POLL_MS = 2_000;
const TRY_AGAIN_MS = 5_000;
const WATCH_MS = 1_000;
const GATHER_MS = 200;
const ROUND_MS = 1_000;
const LISTS_MS = 5_000;
const LATE_MS = 5_000;
// Server-sent comments never reach an EventSource, so the server's keep-alive is a named event.
const EVENTS = ["hello", "ping", "journal", "run", "beat", "reset"] as const;
const SILENT_EVENTS: ReadonlySet<string> = new Set(["hello", "ping"]);

const link: Link = { isOpen: false, hasFailed: false, heardAt: Date.now(), answered: null };
let answeredAt = Date.now();
let current: { connection: Connection; since: number } = {
  connection: "connecting",
  since: Date.now(),
};
const listeners = new Set<() => void>();

/** Takes what is new about the connection, and tells everybody when its state changed. */
function note(news: Partial<Link>) {
  Object.assign(link, news);
  const now = Date.now();
  const connection = connectionOf(link, now);
  if (connection === current.connection) return;
  // A server that is away was last heard of before the page noticed.
  const since = connection === "away" ? Math.max(link.heardAt, answeredAt) : now;
  current = { connection, since };
  for (const listener of listeners) listener();
}

/** How the page hears of news, and since when. */
export function useConnection() {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => current,
  );
}

/** How often a query asks by itself: never while the stream tells, unless it got no answer. */
export const pollMs = (query: { state: { error: unknown } }): number | false =>
  current.connection === "live" && !(query.state.error instanceof AwayError) ? false : POLL_MS;

interface News {
  run?: string;
  uid?: string;
}

// A heartbeat moves these views of its own run, and the list of runs; lines and states move all
// that is about a run.
const BEATING = new Set(["show", "heartbeats", "metrics"]);
const UNMOVED = new Set(["session", "compare"]);

/** Marks as old what the server has news of; much at once costs one round of requests. */
class Gatherer {
  private told = new Set<string>();
  private beats = new Set<string>();
  private all = false;
  private timer: number | undefined;
  private flushedAt = 0;
  private listedAt = 0;

  constructor(private readonly client: QueryClient) {}

  tell({ run, uid }: News, isBeat: boolean) {
    const names = isBeat ? this.beats : this.told;
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
    // What is under way may have missed the news, and to begin it again each time would starve it.
    if (this.client.isFetching() > 0 && !late) {
      this.timer = window.setTimeout(() => this.flush(), GATHER_MS);
      return;
    }
    const { told, beats, all } = this;
    this.told = new Set();
    this.beats = new Set();
    this.all = false;
    this.flushedAt = Date.now();
    // Many live runs beat all the time: the list of runs follows them at a slower pace.
    const listed = beats.size > 0 && this.flushedAt - this.listedAt >= LISTS_MS;
    if (listed || told.size > 0 || all) this.listedAt = this.flushedAt;
    const predicate = ({ queryKey: [kind, name, view] }: Query) => {
      if (UNMOVED.has(String(kind))) return false;
      if (all) return true;
      if (kind === "run") {
        return told.has(String(name)) || (beats.has(String(name)) && BEATING.has(String(view)));
      }
      if (kind === "checkpoint") return told.has(runOf(String(name)));
      return told.size > 0 || (listed && kind === "runs");
    };
    void this.client.invalidateQueries({ predicate }, { cancelRefetch: false });
  }
}

function read(data: string): News {
  try {
    return JSON.parse(data) as News;
  } catch {
    return {};
  }
}

function listen(client: QueryClient): () => void {
  const gatherer = new Gatherer(client);
  let source: EventSource | null = null;
  let again: number | undefined;
  const connect = () => {
    source?.close();
    source = new EventSource("/api/v1/events");
    source.onopen = () => {
      note({ isOpen: true, hasFailed: false, heardAt: Date.now() });
      // Whatever happened while nobody listened.
      gatherer.tell({}, false);
    };
    for (const name of EVENTS) {
      source.addEventListener(name, (message: MessageEvent<string>) => {
        note({ heardAt: Date.now() });
        if (!SILENT_EVENTS.has(name)) gatherer.tell(read(message.data), name === "beat");
      });
    }
    source.onerror = () => {
      const wasOpen = link.isOpen;
      note({ isOpen: false, hasFailed: true });
      // One round now; its answers set the clocks of the next.
      if (wasOpen) gatherer.tell({}, false);
      if (source?.readyState !== EventSource.CLOSED) return;
      clearTimeout(again);
      again = window.setTimeout(connect, TRY_AGAIN_MS);
    };
  };
  connect();
  // A server that was frozen or cut off closes nothing: only the silence tells.
  const watch = window.setInterval(() => {
    if (!link.isOpen || isFresh(link, Date.now())) return;
    note({ isOpen: false, hasFailed: true, answered: null });
    void probe();
    connect();
  }, WATCH_MS);
  return () => {
    source?.close();
    clearTimeout(again);
    clearInterval(watch);
    gatherer.stop();
  };
}

/** Listens for as long as the page is open; once, near the root. */
export function useLive() {
  const client = useQueryClient();
  useEffect(() => {
    const forget = onReach((reached) => {
      if (reached) answeredAt = Date.now();
      note({ answered: reached });
    });
    const stop = listen(client);
    return () => {
      forget();
      stop();
    };
  }, [client]);
}
