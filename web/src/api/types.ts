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
  // What a list adds, where the server knows it.
  steps_total?: number | null;
  eta_s?: number | null;
  goodput?: Goodput | null;
  loss?: number[] | null;
  last_checkpoint_at?: string | null;
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

export interface Run extends Omit<RunRow, "attempts" | "goodput"> {
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

export interface Series {
  name: string;
  x: number[];
  y: (number | null)[];
}

export type Metrics = Series[];

export interface NodeRow {
  host: string;
  attempts: number;
  failures: number;
  faults?: Record<string, number> | null;
  last_failure_at?: string | null;
  last_seen_at?: string | null;
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

export interface Comparison {
  a: Record<string, unknown>;
  b: Record<string, unknown>;
}
