// The page's names for the API's types, with narrower types where OpenAPI is general.
import type * as api from "./schema";

export interface Page<T> {
  items: T[];
  next: string | null;
}

/** The goodput of a run, `holdfast.contracts.account.goodput.Goodput`. */
export type Goodput = Omit<api.GoodputTotals, "runs" | "ettr" | "money"> & {
  ettr: number;
  cost: number | null;
  preemption_cost: number | null;
  on_demand_cost: number | null;
  saved: number | null;
  currency: string | null;
};

export type RunRow = Omit<api.RunLine, "goodput"> & { goodput: Goodput | null };
/** One page of runs. The first one also lists the runs that cannot be read. */
export type RunPage = Page<RunRow> & Pick<api.RunPage, "unreadable">;
export type Run = Omit<api.RunDetail, "goodput"> & { goodput: Goodput | null };
export type Attempt = api.AttemptView;
export type Launch = api.LaunchView;

interface Measured {
  metrics: Record<string, number>;
}
export type Checkpoint = Omit<api.CheckpointRow, "metrics"> & Measured;
export type CheckpointDetail = Omit<api.CheckpointDetail, "metrics"> & Measured;

export type GraphNode = api.Node & { id: string; kind: string };
export type GraphEdge = api.Edge;
export interface Graph {
  nodes: GraphNode[];
  edges: GraphEdge[];
  nodes_total?: number;
}

/** A long action. `result` is set when `state` is "done". */
export type Job = Omit<api.JobRow, "result"> & {
  result: { ok?: boolean; damaged?: unknown[]; path?: string; bytes?: number } | null;
};

/** What the name of a log file says about it. */
export type LogPlace = Omit<api.LogMatch, "offset" | "text">;

export type Event = api.EventView;
export type NodeBeat = api.AttemptNode;
export type {
  Ancestor, AttentionItem, Capacity, Comparison, Crash, Fact, FilterValues, GoodputGroup,
  GoodputTotals, Heartbeats, LogMatch, LogSearch, Money, NodeFault, NodeRow, Noticed,
  OperatorRequest, Point, Prune, RankRow, RunLog, RunLogPart, RunsComparison, RunsFact, Segment,
  Series, StorageRow,
  StorageTotals, Supervision, UnreadableRun, Verdict,
  WaitingRun,
} from "./schema";
export type {
  ErrorEntry, FlightGroup, LaunchDifference, LaunchName, RunErrors, StackDump, StackGroup,
} from "./schema";
