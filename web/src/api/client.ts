// Requests to the server in JSON, its errors, and whether it responds.
import { noteServerTime } from "../clock";
import { PREFIX } from "../prefix";

export const BASE = `${PREFIX}/api/v1`;
const LIMIT_MS = 20_000;
const PROBE_MS = 5_000;
const HEADER = "X-Holdfast-CSRF";
let csrfToken: string | null = null;

/** Sets the session's CSRF token, which `/session` returns. */
export function setCsrfToken(token: string | null) {
  csrfToken = token;
}

/** An error response, with the server's message. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    message: string,
  ) {
    super(message);
  }
}

/** The server did not respond. */
export class AwayError extends Error {}

const TITLES: Record<number, string> = {
  401: "You are not logged in.",
  403: "Your role does not allow this.",
  404: "Not found.",
  409: "Conflicting request.",
  422: "This cannot be done.",
  429: "Too many attempts.",
};

type Listener = (reached: boolean) => void;
const listeners = new Set<Listener>();

/** Calls `listener` after every request with whether the server responded. Returns a function that
    removes the listener. */
export function onReach(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Notifies the listeners whether the server responded. */
export function notifyReach(reached: boolean) {
  for (const listener of listeners) listener(reached);
}

async function refusal(response: Response): Promise<ApiError> {
  const body = (await response.json().catch(() => ({}))) as { message?: unknown };
  const title = TITLES[response.status] ?? `The server returned status ${response.status}.`;
  const message = typeof body.message === "string" ? body.message : response.statusText;
  return new ApiError(response.status, title, message);
}

async function send(path: string, init: RequestInit, limitMs = LIMIT_MS): Promise<Response> {
  let response: Response;
  try {
    const signal = AbortSignal.timeout(limitMs);
    response = await fetch(BASE + path, { credentials: "same-origin", signal, ...init });
  } catch (error) {
    notifyReach(false);
    const reason = (error as Error).message;
    throw new AwayError(`The server did not respond (${reason}).`, { cause: error });
  }
  // These responses come from a proxy whose server is unreachable.
  notifyReach(![502, 503, 504].includes(response.status));
  noteServerTime(response.headers.get("date"));
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Returns whether the server responds. Listeners of `onReach` get the result too. */
export async function probe(): Promise<boolean> {
  try {
    await send("/session", {}, PROBE_MS);
    return true;
  } catch (error) {
    return error instanceof ApiError;
  }
}

export async function get<T>(path: string): Promise<T> {
  const response = await send(path, { headers: { Accept: "application/json" } });
  return (await response.json()) as T;
}

type Value = string | number | boolean | null | undefined;

/** Returns `path` with the query parameters that have a value. A list repeats its parameter. */
export function withQuery(path: string, query: Record<string, Value | readonly string[]>) {
  const pairs = Object.entries(query).flatMap(([key, value]) =>
    (Array.isArray(value) ? value as string[] : [value as Value])
      .filter((one) => one != null && one !== "")
      .map((one) => [key, String(one)]));
  const text = new URLSearchParams(pairs).toString();
  return text ? `${path}?${text}` : path;
}

export async function remove(path: string): Promise<void> {
  await send(path, { method: "DELETE", headers: changeHeaders() });
}

const changeHeaders = (): Record<string, string> => (csrfToken ? { [HEADER]: csrfToken } : {});

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  const headers = { "Content-Type": "application/json", ...changeHeaders() };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body) });
  return response.status === 204 ? (undefined as T) : ((await response.json()) as T);
}
