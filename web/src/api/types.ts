// What the server tells, as `holdfast.api.schemas` has it. Times are ISO-8601 in UTC, durations
// seconds, sizes bytes.

export interface Page<T> {
  items: T[];
  next: string | null;
}

export interface Goodput {
  total_s: number;
  queued_s: number;
  starting_s: number;
  loading_s: number;
  training_s: number;
  lost_s: number;
  blocked_s: number;
  hung_s: number;
  flushing_s: number;
  stopped_s: number;
  ettr: number;
  steps_lost: number;
  gpu_hours: number;
  preemption_gpu_hours: number;
  cost: number | null;
  preemption_cost: number | null;
  on_demand_cost: number | null;
  saved: number | null;
  currency: string | null;
}

export interface RunRow {
  run: string;
  name: string;
  uid: string;
  state: string;
  reason: string | null;
  step: number | null;
  attempts: number;
  world_size: number | null;
  cause: string | null;
  job_id: string | null;
  root: string;
  path: string;
  forked_from: string | null;
  created_by: string;
  created_at: string;
  ended_at: string | null;
  // What the list of runs adds to a summary.
  updated_at?: string;
  committed_at?: string | null;
  steps_total?: number | null;
  goodput?: Goodput | null;
  spark?: number[];
}

export interface Incarnation {
  number: number;
  world_size: number | null;
  resumed_from: string | null;
  first_step: number | null;
  last_step: number | null;
  started_at: string | null;
  ended_at: string | null;
  ending: string | null;
  exit_code: number | null;
}

export interface Attempt {
  number: number;
  state: string;
  cause: string | null;
  evidence: string[];
  reason: string | null;
  executor: string | null;
  job_id: string | null;
  nodes: string[];
  world_size: number;
  resumed_from: string | null;
  resumed_step: number | null;
  first_step: number | null;
  last_step: number | null;
  committed_step: number | null;
  steps: number | null;
  incarnations: Incarnation[];
  submitted_at: string | null;
  started_at: string | null;
  stop_requested_at: string | null;
  stop_committed_at: string | null;
  ended_at: string | null;
  signal_to_commit_s: number | null;
  failed_rank: number | null;
  traceback: string | null;
}

export interface Noticed {
  kind: string;
  attempt: number | null;
  at: number;
  text: string;
}

export interface FailedSave {
  checkpoint: string;
  step: number;
  error: string;
  at: number;
}

export interface Run extends Omit<RunRow, "attempts" | "goodput"> {
  on_disk?: boolean;
  failed_saves?: FailedSave[];
  noticed?: Noticed[];
  live_step?: number | null;
  gpus_min?: number | null;
  gpus_max?: number | null;
  spec: Record<string, unknown>;
  spec_digest: string;
  command_digest: string | null;
  goodput: Goodput;
  attempts: Attempt[];
  flow_run: string | null;
}

export interface Checkpoint {
  id: string;
  run: string;
  step: number;
  path: string;
  state: string;
  reason: string;
  saved_for: string | null;
  detail: string | null;
  parent: string | null;
  attempt: number;
  incarnation: number;
  world_size: number | null;
  bytes: number | null;
  files: number | null;
  checksum: string | null;
  command_digest: string | null;
  blocked_s: number | null;
  flush_s: number | null;
  staged_at: string | null;
  committed_at: string | null;
  deleted_at: string | null;
  pinned: boolean;
  rolled_back: boolean;
  metrics: Record<string, number>;
  // The last time that every byte was read, by whom, or by a resume; and the copy elsewhere.
  verified_ok?: boolean | null;
  verified_at?: string | null;
  verified_by?: string | null;
  mirrored_at?: string | null;
}

export interface Event {
  run: string;
  journal: string;
  incarnation: number;
  sequence: number;
  attempt: number | null;
  time: string;
  kind: string;
  data: Record<string, unknown>;
}

export interface GraphNode {
  id: string;
  kind: "run" | "attempt" | "checkpoint" | "export" | string;
  run?: string;
  state?: string;
  step?: number;
  number?: number;
  cause?: string | null;
  world_size?: number | null;
  pinned?: boolean;
  rolled_back?: boolean;
  path?: string;
  verified?: boolean | null;
  mirrored?: boolean;
}

export interface GraphEdge {
  from: string;
  to: string;
  kind: string;
}

export interface Graph {
  nodes: GraphNode[];
  edges: GraphEdge[];
}

/** One checkpoint of an ancestry, which may be very long. */
export type Ancestor = Pick<
  Checkpoint,
  "id" | "run" | "step" | "attempt" | "state" | "parent" | "world_size" | "bytes" | "committed_at"
>;

export interface Verdict {
  checkpoint: string;
  step: number;
  bytes: number;
  reason: string;
}

export interface Prune {
  run: string;
  dry_run: boolean;
  deleted: Verdict[];
  kept: Verdict[];
  bytes_deleted: number;
  bytes_kept: number;
}

export interface FileRow {
  path: string;
  bytes: number;
  checksum: string;
}

export interface CheckpointDetail extends Checkpoint {
  on_disk?: boolean;
  mirror?: string | null;
  manifest?: Record<string, unknown> | null;
  manifest_files?: FileRow[];
  commands?: Record<string, string>;
}

export interface RankRow {
  rank: number;
  node: number;
  step: number;
  phase: string;
  age_s: number | null;
  step_time_s: number;
  step_p50_s: number;
  step_p99_s: number;
  own_s: number;
  rss_bytes: number | null;
  cpu_percent: number | null;
}

export interface NodeBeat {
  node: number;
  host: string;
  time: string;
  age_s: number;
  incarnation: number;
  memory_percent: number | null;
  gpus: Record<string, unknown>[];
  ranks: RankRow[];
}

export interface Heartbeats {
  run: string;
  attempt: number | null;
  nodes: NodeBeat[];
  clock_problems: string[];
}

/** An action that takes a while; `result` is there once `state` is "done". */
export interface Job {
  id: string;
  state: "waiting" | "running" | "done" | "failed";
  done_bytes: number;
  total_bytes: number | null;
  result: { ok?: boolean; damaged?: unknown[]; path?: string; bytes?: number } | null;
  error: string | null;
}

export interface LogFile {
  attempt: number;
  node: string;
  incarnation: number;
  rank: number;
  stream: string;
  bytes: number;
}

export interface LogPart {
  run: string;
  attempt: number;
  rank: number;
  stream: string;
  incarnation: number;
  offset: number;
  next_offset: number;
  bytes: number;
  text: string;
  ended: boolean;
}

export interface Point {
  step: number;
  time: string;
  time_s: number;
  steps_per_s: number | null;
  values: Record<string, { last: number | null; low: number | null; high: number | null }>;
}

/** What one launch of torchrun logged, oldest first. */
export interface Series {
  attempt: number;
  incarnation: number;
  points: Point[];
}

export interface NodeRow {
  host: string;
  attempts: number;
  failures: number;
  faults: Record<string, number>;
  last_started_at: string | null;
  last_failed_at: string | null;
}

export interface NodeFault {
  run: string;
  attempt: number;
  cause: string;
  started_at: string | null;
  ended_at: string | null;
}

export interface StorageRow {
  run: string;
  uid: string;
  name: string;
  state: string;
  root: string;
  kept: number;
  kept_bytes: number;
  damaged: number;
  damaged_bytes: number;
  deleted: number;
  deleted_bytes: number;
  would_prune: string[];
  would_prune_bytes: number;
}

/** The same thing of two checkpoints; `is_same` is null when one of them does not say. */
export interface Fact {
  name: string;
  one: unknown;
  other: unknown;
  is_same: boolean | null;
}

export interface Comparison {
  one: string;
  other: string;
  common_ancestor: string | null;
  facts: Fact[];
  config: Fact[];
  metrics: Fact[];
}
