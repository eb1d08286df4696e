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
export type Run = Omit<api.RunDetail, "goodput"> & { goodput: Goodput };
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
}

/** A long action. `result` is set when `state` is "done". */
export type Job = Omit<api.JobRow, "result"> & {
  result: { ok?: boolean; damaged?: unknown[]; path?: string; bytes?: number } | null;
};

export type Event = api.EventView;
export type NodeBeat = api.AttemptNode;
export type {
  Ancestor, Comparison, Fact, GoodputTotals, Heartbeats, LogFile, LogPart, Money, NodeFault,
  NodeRow, Noticed, OperatorRequest, Point, Prune, RankRow, Segment, Series, StorageRow,
  StorageTotals, Supervision, UnreadableRun, Verdict,
} from "./schema";
