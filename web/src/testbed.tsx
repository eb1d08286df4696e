// The whole page over a fake server, for the component tests. Fake are only the edges: fetch, the
// event stream, and the worker that lays out the graph.
import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, createRouter, RouterProvider } from "@tanstack/react-router";
import { cleanup, configure, fireEvent, render, screen, within } from "@testing-library/react";
import { afterEach, vi } from "vitest";
import { createQueryClient } from "./api/cache";
import type * as api from "./api/schema";
import type { Page } from "./api/types";
import { ClockProvider } from "./parts/basics";
import { router } from "./router";
import { detail, errors, ID, run } from "./samples";

// Less than the limit of a test in vite.config.ts, so that the error says what was missing.
const WAIT_MS = 30_000;
configure({ asyncUtilTimeout: WAIT_MS });

/** The requests that the fake server knows, and the types of their answers. */
interface Answers {
  "GET /session": api.Session;
  "POST /session": api.Session;
  "DELETE /session": null;
  "GET /runs": api.RunPage;
  "GET /attention": api.AttentionItem[];
  "GET /filters": api.FilterValues;
  "GET /queue": api.WaitingRun[];
  "GET /goodput": api.GoodputTotals;
  "GET /goodput/groups": api.GoodputGroup[];
  "POST /attention/acknowledge": api.AttentionItem;
  "GET /runs/gpt": api.RunDetail;
  "GET /runs/vit": api.RunDetail;
  "GET /runs/gpt/capacity": api.Capacity;
  "GET /runs/vit/timeline": api.Segment[];
  "POST /runs/vit/stop": api.ActionDone;
  "POST /runs/vit/pause": api.ActionDone;
  "GET /runs/gpt/timeline": api.Segment[];
  "GET /runs/gpt/checkpoints": Page<api.CheckpointRow>;
  "GET /runs/gpt/metrics": api.Series[];
  "GET /runs/vit/metrics": api.Series[];
  "GET /runs/vit/checkpoints": Page<api.CheckpointRow>;
  "GET /compare/runs": api.RunsComparison;
  "GET /compare": api.Comparison;
  "GET /runs/gpt/lineage": api.Graph;
  "GET /runs/gpt/errors": api.RunErrors;
  "GET /runs/gpt/heat-map": api.HeatMap;
  "GET /runs/gpt/gpus": api.GpuSeries;
  "GET /runs/gpt/heartbeats": api.Heartbeats;
  "GET /runs/gpt/log-files": api.RunLog[];
  "GET /runs/gpt/log-files/part": api.RunLogPart;
  "GET /runs/gpt/log-files/search": api.LogSearch;
  "POST /runs/gpt/annotate": api.AnnotationDone;
  "POST /runs/gpt/relaunch": api.ActionDone;
  "POST /runs/gpt/stop": api.ActionDone;
  "POST /runs/gpt/pause": api.ActionDone;
  "POST /runs/gpt/cancel": api.ActionDone;
  "POST /runs/gpt/resume": api.ActionDone;
  [DETAIL]: api.CheckpointDetail;
  [ANCESTRY]: api.Ancestor[];
  [PIN]: api.Pinned;
  [UNPIN]: api.Pinned;
  [ANNOTATE]: api.AnnotationDone;
}
export const DETAIL = `GET /checkpoints/${ID}` as const;
export const ANCESTRY = `GET /checkpoints/${ID}/ancestry` as const;
export const PIN = `POST /checkpoints/${ID}/pin` as const;
export const ANNOTATE = `POST /checkpoints/${ID}/annotate` as const;
export const UNPIN = `POST /checkpoints/${ID}/unpin` as const;

interface Asked {
  request: string;
  query: Record<string, string>;
  body: unknown;
  csrf: string | undefined;
}

/** An answer, the body of an error response, or "away" if the server does not respond. */
type Answer<T> = T | api.Problem | "away";
type Given = { [K in keyof Answers]?: Answer<Answers[K]> | ((asked: Asked) => Answer<Answers[K]>) };

export const SESSION: api.Session =
  { name: "mia", role: "operator", csrf: "csrf-word", version: "0.1.0" };
export const LOGGED_OUT: api.Session = { ...SESSION, name: null, role: null, csrf: null };

export const problem = (status: number, message: string): api.Problem =>
  ({ status, code: "refused", message, problems: [] });

const isProblem = (answer: unknown): answer is api.Problem =>
  typeof answer === "object" && answer !== null && "code" in answer && "problems" in answer;

export class Server {
  private readonly asked: Asked[] = [];
  private answers: Given;

  constructor(answers: Given) {
    this.answers = {
      "GET /session": SESSION,
      "GET /attention": [],
      "GET /filters": { users: ["ann", "mia"], causes: ["hang", "node_failure"],
        partitions: ["a100"], accounts: ["vision"], tags: ["llm", "night"] },
      "GET /runs/gpt": run({}),
      "GET /runs/gpt/timeline": [],
      "GET /runs/vit/timeline": [],
      "GET /runs/gpt/capacity": { gpus_free: null, where: "local", problem: null },
      "GET /runs/gpt/checkpoints": { items: [], next: null },
      "GET /runs/gpt/metrics": [],
      "GET /runs/gpt/errors": errors({}),
      [DETAIL]: detail({}),
      [ANCESTRY]: [],
      ...answers,
    };
  }

  /** Changes the answers to later requests. */
  give(answers: Given) {
    Object.assign(this.answers, answers);
  }

  /** The requests so far that change something, or those named `request`. */
  requests(request?: keyof Answers): Asked[] {
    return this.asked.filter((one) =>
      request ? one.request === request : !one.request.startsWith("GET "));
  }

  readonly fetch = (path: string, init: RequestInit = {}): Promise<Response> => {
    const url = new URL(path, window.location.href);
    const name = decodeURIComponent(url.pathname.replace(/^\/api\/v1/, ""));
    const headers = init.headers as Record<string, string> | undefined;
    const asked: Asked = {
      request: `${init.method ?? "GET"} ${name}`,
      query: Object.fromEntries(url.searchParams),
      body: typeof init.body === "string" ? JSON.parse(init.body) as unknown : undefined,
      csrf: headers?.["X-Holdfast-CSRF"],
    };
    this.asked.push(asked);
    const given = this.answers[asked.request as keyof Answers];
    const answer: unknown = typeof given === "function" ? given(asked) : given;
    if (answer === "away") return Promise.reject(new TypeError("Failed to fetch"));
    if (answer === undefined) throw new Error(`a request without an answer: ${asked.request}`);
    const status = isProblem(answer) ? answer.status : answer === null ? 204 : 200;
    const body = answer === null ? null : JSON.stringify(answer);
    return Promise.resolve(new Response(body, { status }));
  };
}

/** The page's event stream. Until a test calls `onopen`, the page polls. */
class Stream {
  static readonly CLOSED = 2;
  readonly readyState = 1;
  onopen = () => {};
  private readonly listeners = new Map<string, (message: { data: string }) => void>();

  constructor() {
    streams.push(this);
  }

  addEventListener(name: string, listener: (message: { data: string }) => void) {
    this.listeners.set(name, listener);
  }

  send(name: string, data: unknown) {
    this.listeners.get(name)?.({ data: JSON.stringify(data) });
  }

  close() {}
}

const streams: Stream[] = [];

/** The stream that the page opened last. */
export const stream = () => streams.at(-1) as Stream;

interface Work {
  id: number;
  cmd: string;
  graph?: { children: { id: string }[] };
}

/** The layout worker: all cards in one row. */
class LayoutWorker {
  onmessage: (message: { data: unknown }) => void = () => {};

  postMessage({ id, graph }: Work) {
    const children = graph?.children.map((one, index) => ({ ...one, x: 200 * index, y: 0 }));
    queueMicrotask(() => this.onmessage({ data: { id, data: { ...graph, children } } }));
  }

  terminate() {}
}

/** Opens the page at `path`. */
export function openPage(path: string, answers: Given = {}): Server {
  const server = new Server(answers);
  vi.stubGlobal("fetch", server.fetch);
  vi.stubGlobal("EventSource", Stream);
  vi.stubGlobal("Worker", LayoutWorker);
  const history = createMemoryHistory({ initialEntries: [path] });
  const { routeTree, options: { parseSearch } } = router;
  const client = createQueryClient();
  const own = createRouter({ routeTree, history, parseSearch, context: { client } });
  render(
    <QueryClientProvider client={client}>
      <ClockProvider>
        <RouterProvider router={own} />
      </ClockProvider>
    </QueryClientProvider>,
  );
  return server;
}

export const button = (name: string) => screen.findByRole("button", { name });

/** The texts of the rows of the table `label`. */
export const rowsOf = (label: string): (string | null)[] =>
  [...screen.getByRole("region", { name: label }).querySelectorAll("tbody tr")]
    .map((row) => row.textContent);

/** Clicks the button `name` of the page, and returns the queries of its dialog. */
export async function begin(name: string) {
  fireEvent.click(await button(name));
  return within(await screen.findByRole("dialog"));
}

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});
