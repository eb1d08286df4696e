// The time by the server's clock, because that of the browser may be wrong by hours.

// Smaller differences come from the network, and from a server that was stopped for a while.
const ERROR_MIN_MS = 30_000;
let errorMs = 0;

/** Notes the server's time from the `Date` header of a response. */
export function noteServerTime(date: string | null) {
  const ahead = Date.parse(date ?? "") - Date.now();
  if (!Number.isNaN(ahead)) errorMs = Math.abs(ahead) < ERROR_MIN_MS ? 0 : ahead;
}

/** The server's time for one of the browser, in milliseconds since 1970; now by default. */
export const serverTime = (local = Date.now()): number => local + errorMs;
