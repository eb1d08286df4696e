// Whether the page is up to date, from what its stream and its requests report. Pure.

export type Connection = "connecting" | "live" | "polling" | "away";

/** The server sends a ping every 5 s; a stream that is silent for longer than this is dead. */
export const SILENT_MS = 12_000;

export interface Link {
  isOpen: boolean;
  /** Whether the stream has failed at least once since it was last open. */
  hasFailed: boolean;
  /** When the stream last delivered anything, ms. */
  heardAt: number;
  /** The outcome of the latest request; null when none was made since the stream failed. */
  answered: boolean | null;
}

export const isFresh = ({ isOpen, heardAt }: Link, now: number): boolean =>
  isOpen && now - heardAt <= SILENT_MS;

/** An open stream that delivers outweighs a failed request; without one, requests decide. */
export function connectionOf(link: Link, now: number): Connection {
  if (isFresh(link, now)) return "live";
  if (link.answered === false) return "away";
  return link.hasFailed && link.answered ? "polling" : "connecting";
}
