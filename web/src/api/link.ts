// The connection status, from the event stream and the requests. Pure functions.

export type Connection = "connecting" | "live" | "polling" | "away";

/** The server sends a ping every 5 s. A stream that is silent for longer than this has failed. */
export const SILENT_MS = 12_000;

export interface Link {
  isOpen: boolean;
  /** Whether the stream has failed at least once since it was last open. */
  hasFailed: boolean;
  /** When the stream last delivered an event, in ms. */
  heardAt: number;
  /** Whether the latest request was answered; null if none was made since the stream failed. */
  answered: boolean | null;
}

export const isFresh = ({ isOpen, heardAt }: Link, now: number): boolean =>
  isOpen && now - heardAt <= SILENT_MS;

/** A working stream counts more than a failed request. Without a stream, requests decide. */
export function connectionOf(link: Link, now: number): Connection {
  if (isFresh(link, now)) return "live";
  if (link.answered === false) return "away";
  return link.hasFailed && link.answered ? "polling" : "connecting";
}
