// All views and their addresses. Most views are loaded when they are opened.
import type { FetchQueryOptions, QueryClient, QueryKey } from "@tanstack/react-query";
import {
  createRootRouteWithContext,
  createRoute,
  createRouter,
  parseSearchWith,
} from "@tanstack/react-router";
import { createQueryClient } from "./api/cache";
import {
  graphOptions, newestCheckpointsOptions, runOptions, timelineOptions,
} from "./api/queries";
import { curveSearch, runsOf, type CurveSearch } from "./curveView";
import { startWorker } from "./elk";
import { groupOf, type GoodputSearch } from "./goodput";
import { lazyView } from "./lazy";
import { Problem } from "./parts/basics";
import { NotFound } from "./pages/NotFound";
import { PREFIX } from "./prefix";
import { Runs } from "./pages/Runs";
import { readRunsSearch, readValue, text } from "./runsSearch";
import { Shell } from "./shell";
import { tableSearch } from "./tableSearch";

interface Context {
  client: QueryClient;
}

const root = createRootRouteWithContext<Context>()({
  component: Shell,
  notFoundComponent: NotFound,
  errorComponent: ({ error }) => <Problem error={error} />,
});

const runs = createRoute({
  getParentRoute: () => root,
  path: "/",
  component: Runs,
  validateSearch: readRunsSearch,
});

const runView = lazyView(() => import("./pages/run/Run"), "RunPage");
const run = createRoute({
  getParentRoute: () => root,
  path: "/runs/$run",
  component: runView,
  // The loaders of a run's page begin all that it needs at once, and do not wait for it. Otherwise
  // each part would be requested only when the part around it is drawn.
  loader: ({ context: { client }, params, preload }) => {
    runView.begin();
    if (!preload) ask(client, runOptions(params.run));
  },
});

/** Begins a request, unless its answer is known. */
function ask<Answer, Failure, Data, Key extends QueryKey>(
  client: QueryClient, options: FetchQueryOptions<Answer, Failure, Data, Key>,
) {
  void client.prefetchQuery({ ...options, staleTime: Number.POSITIVE_INFINITY });
}

const page = <P extends string>(
  path: P,
  load: () => Promise<Record<string, unknown>>,
  name: string,
) =>
  createRoute({
    getParentRoute: () => run,
    path,
    component: lazyView(load, name),
  });

const overviewView = lazyView(() => import("./pages/run/Overview"), "Overview");
const overview = createRoute({
  getParentRoute: () => run,
  path: "/",
  component: overviewView,
  validateSearch: curveSearch,
  loader: ({ context: { client }, params, preload }) => {
    overviewView.begin();
    if (preload) return;
    ask(client, newestCheckpointsOptions(params.run));
    ask(client, timelineOptions(params.run));
  },
});
const checkpoints = createRoute({
  getParentRoute: () => run,
  path: "/checkpoints",
  component: lazyView(() => import("./pages/run/Checkpoints"), "Checkpoints"),
  validateSearch: tableSearch,
});
const ranks = page("/ranks", () => import("./pages/run/Ranks"), "Ranks");
const events = page("/events", () => import("./pages/run/Events"), "Events");

interface LogsSearch {
  file?: string;
  attempt?: string;
  /** The byte of the line to show. */
  at?: number;
}

const logs = createRoute({
  getParentRoute: () => run,
  path: "/logs",
  component: lazyView(() => import("./pages/run/Logs"), "Logs"),
  validateSearch: (given: Record<string, unknown>): LogsSearch => ({
    file: text(given.file),
    at: typeof given.at === "number" && given.at >= 0 ? given.at : undefined,
    attempt: text(given.attempt),
  }),
});

const errors = createRoute({
  getParentRoute: () => run,
  path: "/errors",
  component: lazyView(() => import("./pages/run/Errors"), "Errors"),
  validateSearch: (given: Record<string, unknown>): { attempt?: string } => ({
    attempt: text(given.attempt),
  }),
});

const lineageView = lazyView(() => import("./pages/run/Lineage"), "Lineage");
const lineage = createRoute({
  getParentRoute: () => run,
  path: "/lineage",
  component: lineageView,
  validateSearch: (given: Record<string, unknown>): { at?: string } => ({ at: text(given.at) }),
  loader: ({ context: { client }, params, preload }) => {
    lineageView.begin();
    if (preload) return;
    // If it cannot begin, the layout says so.
    void Promise.resolve().then(startWorker).catch(() => undefined);
    ask(client, graphOptions(params.run, []));
  },
});

const checkpoint = createRoute({
  getParentRoute: () => root,
  path: "/checkpoints/$id",
  component: lazyView(() => import("./pages/Checkpoint"), "CheckpointPage"),
});

export interface CompareSearch extends CurveSearch {
  /** The compared runs, `a,b`. */
  runs?: string;
  /** The compared checkpoints. */
  a?: string;
  b?: string;
  what?: "checkpoints";
  /** Whether equal facts are shown, too. */
  all?: true;
}

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  component: lazyView(() => import("./pages/Compare"), "Compare"),
  validateSearch: (given: Record<string, unknown>): CompareSearch => ({
    ...curveSearch(given),
    over: undefined,
    runs: runsOf(given.runs).join(",") || undefined,
    a: text(given.a),
    b: text(given.b),
    what: given.what === "checkpoints" ? "checkpoints" : undefined,
    all: given.all === true ? true : undefined,
  }),
});

const goodput = createRoute({
  getParentRoute: () => root,
  path: "/goodput",
  component: lazyView(() => import("./pages/Goodput"), "GoodputPage"),
  validateSearch: (given: Record<string, unknown>): GoodputSearch => ({
    user: text(given.user),
    partition: text(given.partition),
    account: text(given.account),
    tag: text(given.tag),
    since: text(given.since),
    by: groupOf(given.by),
  }),
});

const queue = createRoute({
  getParentRoute: () => root,
  path: "/queue",
  component: lazyView(() => import("./pages/Queue"), "Queue"),
  validateSearch: tableSearch,
});

const nodes = createRoute({
  getParentRoute: () => root,
  path: "/nodes",
  component: lazyView(() => import("./pages/Nodes"), "Nodes"),
  validateSearch: (given: Record<string, unknown>): { host?: string; sort?: string } => ({
    host: text(given.host),
    sort: text(given.sort),
  }),
});

const storage = createRoute({
  getParentRoute: () => root,
  path: "/storage",
  component: lazyView(() => import("./pages/Storage"), "Storage"),
  validateSearch: (given: Record<string, unknown>): { sort?: string } =>
    ({ sort: text(given.sort) }),
});

export const router = createRouter({
  routeTree: root.addChildren([
    runs,
    run.addChildren([overview, checkpoints, ranks, errors, logs, events, lineage]),
    checkpoint,
    compare,
    goodput,
    queue,
    nodes,
    storage,
  ]),
  context: { client: createQueryClient() },
  basepath: PREFIX || "/",
  parseSearch: parseSearchWith(readValue),
  defaultPreload: "intent",
  defaultErrorComponent: ({ error }) => <Problem error={error} />,
  scrollRestoration: true,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
