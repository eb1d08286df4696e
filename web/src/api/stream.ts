// One connection to the server's event stream.
const TRY_AGAIN_MS = 5_000;
// EventSource does not report comments, so the server's keep-alive is a named event.
const EVENTS = ["hello", "ping", "journal", "run", "beat", "reset"] as const;

/** What a stream reports: that it opened or failed, or an event with its JSON. */
export interface News {
  name: "open" | "failed" | (typeof EVENTS)[number];
  data: string;
  /** For `open`: the id of the event after which none is missing, if that is known. */
  after?: string | undefined;
}

export interface Stream {
  isOpen: () => boolean;
  /** Connects again, unless it has just connected. A frozen server does not close a stream. */
  reopen: () => void;
  close: () => void;
}

/** Connects, and again after a failure. The first connection gets the events after id `after`. */
export function openStream(
  url: string, after: string | undefined, tell: (news: News) => void,
): Stream {
  let source: EventSource;
  let isOpen = false;
  let triedAt = 0;
  let again: ReturnType<typeof setTimeout> | undefined;
  const connect = (first?: string) => {
    triedAt = Date.now();
    source = new EventSource(first ? `${url}?after=${encodeURIComponent(first)}` : url);
    source.onopen = () => {
      isOpen = true;
      tell({ name: "open", data: "{}", after: first });
      first = undefined;
    };
    for (const name of EVENTS) {
      source.addEventListener(name, ({ data }: MessageEvent<string>) => tell({ name, data }));
    }
    source.onerror = () => {
      isOpen = false;
      tell({ name: "failed", data: "{}" });
      if (source.readyState !== EventSource.CLOSED) return;
      clearTimeout(again);
      again = setTimeout(connect, TRY_AGAIN_MS);
    };
  };
  connect(after);
  return {
    isOpen: () => isOpen,
    reopen: () => {
      if (Date.now() - triedAt < TRY_AGAIN_MS) return;
      clearTimeout(again);
      source.close();
      isOpen = false;
      connect();
    },
    close: () => {
      clearTimeout(again);
      source.close();
    },
  };
}
