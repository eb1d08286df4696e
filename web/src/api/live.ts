// Live updates: the server's event stream, and polling where a stream does not come through.
import { useQueryClient, type Query, type QueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { runOf } from "../format";
import { onReach } from "./client";

export type Connection = "connecting" | "live" | "polling" | "away";

const POLL_MS = 2_000;
const TRY_AGAIN_MS = 5_000;
const GATHER_MS = 200;
const ROUND_MS = 1_000;
const LATE_MS = 5_000;
const EVENTS = ["journal", "run", "beat", "reset"] as const;

let current: { connection: Connection; since: number } = {
  connection: "connecting",
  since: Date.now(),
};
const listeners = new Set<() => void>();

function become(connection: Connection) {
  if (connection === current.connection) return;
  current = { connection, since: Date.now() };
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

/** How often a query asks by itself: never while the stream tells. */
export const pollMs = (): number | false => (current.connection === "live" ? false : POLL_MS);

interface News {
  run?: string;
  uid?: string;
}

// A heartbeat moves these views of its own run; lines and states move all that is about a run.
const BEATING = new Set(["show", "heartbeats"]);
const UNMOVED = new Set(["session", "compare"]);

/** Marks as old what the server has news of; much at once costs one round of requests. */
class Gatherer {
  private told = new Set<string>();
  private beats = new Set<string>();
  private all = false;
  private timer: number | undefined;
  private flushedAt = 0;

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
    // What is under way may have missed the news, and to begin it anew each time would starve it.
    if (this.client.isFetching() > 0 && !late) {
      this.timer = window.setTimeout(() => this.flush(), GATHER_MS);
      return;
    }
    const { told, beats, all } = this;
    this.told = new Set();
    this.beats = new Set();
    this.all = false;
    this.flushedAt = Date.now();
    const predicate = ({ queryKey: [kind, name, view] }: Query) => {
      if (UNMOVED.has(String(kind))) return false;
      if (all) return true;
      if (kind === "run") {
        return told.has(String(name)) || (beats.has(String(name)) && BEATING.has(String(view)));
      }
      if (kind === "checkpoint") return told.has(runOf(String(name)));
      return told.size > 0;
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
    source = new EventSource("/api/v1/events");
    source.onopen = () => {
      become("live");
      // Whatever happened while nobody listened.
      gatherer.tell({}, false);
    };
    for (const name of EVENTS) {
      source.addEventListener(name, (message: MessageEvent<string>) =>
        gatherer.tell(read(message.data), name === "beat"));
    }
    source.onerror = () => {
      if (current.connection === "live") {
        become("polling");
        // One round now; its answers set the clocks of the next.
        gatherer.tell({}, false);
      } else if (current.connection === "connecting") become("polling");
      if (source?.readyState !== EventSource.CLOSED) return;
      again = window.setTimeout(connect, TRY_AGAIN_MS);
    };
  };
  connect();
  return () => {
    source?.close();
    clearTimeout(again);
    gatherer.stop();
  };
}

/** Listens for as long as the page is open; once, near the root. */
export function useLive() {
  const client = useQueryClient();
  useEffect(() => {
    const forget = onReach((reached) => {
      if (!reached) become("away");
      else if (current.connection === "away") become("polling");
    });
    const stop = listen(client);
    return () => {
      forget();
      stop();
    };
  }, [client]);
}
