// All views and their addresses. Most views are loaded when they are opened.
import {
  createRootRoute,
  createRoute,
  createRouter,
} from "@tanstack/react-router";
import { lazyView } from "./lazy";
import { Problem } from "./parts/basics";
import { NotFound } from "./pages/NotFound";
import { PREFIX } from "./prefix";
import { Runs } from "./pages/Runs";
import { Shell } from "./shell";

const text = (value: unknown): string | undefined =>
  typeof value === "string" && value !== "" ? value : undefined;

const root = createRootRoute({
  component: Shell,
  notFoundComponent: NotFound,
  errorComponent: ({ error }) => <Problem error={error} />,
});

export interface RunsSearch {
  search?: string;
  state?: string;
  focus?: string;
}

const runs = createRoute({
  getParentRoute: () => root,
  path: "/",
  component: Runs,
  validateSearch: (given: Record<string, unknown>): RunsSearch => ({
    search: text(given.search),
    state: text(given.state),
    focus: text(given.focus),
  }),
});

const run = createRoute({
  getParentRoute: () => root,
  path: "/runs/$run",
  component: lazyView(() => import("./pages/run/Run"), "RunPage"),
});

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

const overview = page("/", () => import("./pages/run/Overview"), "Overview");
const checkpoints = page("/checkpoints", () => import("./pages/run/Checkpoints"), "Checkpoints");
const ranks = page("/ranks", () => import("./pages/run/Ranks"), "Ranks");
const events = page("/events", () => import("./pages/run/Events"), "Events");

const logs = createRoute({
  getParentRoute: () => run,
  path: "/logs",
  component: lazyView(() => import("./pages/run/Logs"), "Logs"),
  validateSearch: (given: Record<string, unknown>): { file?: string; attempt?: string } => ({
    file: text(given.file),
    attempt: typeof given.attempt === "number" ? String(given.attempt) : text(given.attempt),
  }),
});

const lineage = createRoute({
  getParentRoute: () => run,
  path: "/lineage",
  component: lazyView(() => import("./pages/run/Lineage"), "Lineage"),
  validateSearch: (given: Record<string, unknown>): { at?: string } => ({ at: text(given.at) }),
});

const checkpoint = createRoute({
  getParentRoute: () => root,
  path: "/checkpoints/$id",
  component: lazyView(() => import("./pages/Checkpoint"), "CheckpointPage"),
});

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  component: lazyView(() => import("./pages/Compare"), "Compare"),
  validateSearch: (given: Record<string, unknown>): { a?: string; b?: string } => ({
    a: text(given.a),
    b: text(given.b),
  }),
});

const goodput = createRoute({
  getParentRoute: () => root,
  path: "/goodput",
  component: lazyView(() => import("./pages/Goodput"), "GoodputPage"),
});

const nodes = createRoute({
  getParentRoute: () => root,
  path: "/nodes",
  component: lazyView(() => import("./pages/Nodes"), "Nodes"),
  validateSearch: (given: Record<string, unknown>): { host?: string } => ({
    host: text(given.host),
  }),
});

const storage = createRoute({
  getParentRoute: () => root,
  path: "/storage",
  component: lazyView(() => import("./pages/Storage"), "Storage"),
});

export const router = createRouter({
  routeTree: root.addChildren([
    runs,
    run.addChildren([overview, checkpoints, ranks, logs, events, lineage]),
    checkpoint,
    compare,
    goodput,
    nodes,
    storage,
  ]),
  basepath: PREFIX || "/",
  defaultPreload: "intent",
  scrollRestoration: true,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
