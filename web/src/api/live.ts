// Live updates: the server's event stream, and polling where a stream does not come through.
import { useQueryClient, type QueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { onReach } from "./client";

export type Connection = "connecting" | "live" | "polling" | "away";

const POLL_MS = 2_000;
const TRY_AGAIN_MS = 5_000;
const GATHER_MS = 250;

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

/** Marks as old what the server has news of; several lines at once cost one round of requests. */
class Gatherer {
  private runs = new Set<string>();
  private timer: number | undefined;

  constructor(private readonly client: QueryClient) {}

  tell(run: string | null) {
    this.runs.add(run ?? "");
    this.timer ??= window.setTimeout(() => this.flush(), GATHER_MS);
  }

  private flush() {
    const runs = this.runs;
    this.runs = new Set();
    this.timer = undefined;
    void this.client.invalidateQueries({
      predicate: ({ queryKey: [kind, run] }) =>
        kind !== "run" || typeof run !== "string" || runs.has(run) || runs.has(""),
    });
  }

  stop() {
    clearTimeout(this.timer);
  }
}

const runOfMessage = (data: string): string | null => {
  try {
    const told = JSON.parse(data) as { run?: unknown };
    return typeof told.run === "string" ? told.run : null;
  } catch {
    return null;
  }
};

function listen(client: QueryClient): () => void {
  const gatherer = new Gatherer(client);
  let source: EventSource | null = null;
  let again: number | undefined;
  const connect = () => {
    source = new EventSource("/api/v1/events");
    const news = (message: MessageEvent<string>) => gatherer.tell(runOfMessage(message.data));
    source.onopen = () => {
      become("live");
      // Whatever happened while nobody listened.
      gatherer.tell(null);
    };
    source.onmessage = news;
    for (const name of ["journal", "run", "beat", "reset"]) {
      source.addEventListener(name, news as EventListener);
    }
    source.onerror = () => {
      if (current.connection !== "away") become("polling");
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
