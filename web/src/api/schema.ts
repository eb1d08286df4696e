// Generated from the OpenAPI document by infra/setup/page_types.py; do not edit.

/** Who acknowledged a problem, when, and with which note. */
export interface Acknowledged {
  by: string;
  at: string;
  note: string;
}

/** A recorded operator request; `message` explains what happens next. */
export interface ActionDone {
  run: string;
  action: string;
  gpus: number | null;
  message: string;
  state: string;
  flow_run?: string | null;
  url?: string | null;
  pid?: number | null;
}

/** One checkpoint of an ancestry. */
export interface Ancestor {
  id: string;
  run: string;
  step: number;
  attempt: number;
  path: string;
  state: string;
  parent: string | null;
  world_size: number | null;
  bytes: number | null;
  checksum: string | null;
  committed_at: string | null;
  pinned: boolean;
  rolled_back: boolean;
}

/** The tags and the note of a run, or of its `checkpoint`, after a change. */
export interface AnnotationDone {
  run: string;
  checkpoint: string | null;
  tags: string[];
  note: string | null;
  note_by: string | null;
  note_at: string | null;
}

/** An operator's request. With `force`, it is sent even while another one is pending. */
export interface Ask {
  force: boolean;
}

/** Acknowledge the problem `id` of the list of what needs attention. */
export interface AskAcknowledge {
  id: string;
  note: string;
}

/** Change tags and the note. Without `note`, it stays as it is. An empty one removes it. */
export interface AskAnnotate {
  add: string[];
  remove: string[];
  note: string;
}

/** Cancel a run. With `now`, it ends without a last checkpoint. */
export interface AskCancel {
  force: boolean;
  now: boolean;
}

/** The export format. `include` selects keys by prefix; `dtype` converts floating-point data. */
export interface AskExport {
  to: ExportFormat;
  include: string[];
  dtype?: "float64" | "float32" | "float16" | "bfloat16" | null;
}

/** The name of the new run and its spec overrides (key to value, as with `--set`). */
export interface AskFork {
  name: string;
  set: Record<string, number | boolean | string>;
}

/** Metrics of a checkpoint by name. What is not finite is text: `nan`, `inf` or `-inf`. */
export interface AskMetrics {
  metrics: Record<string, number | "nan" | "inf" | "-inf">;
}

/** Pin a checkpoint; `note` is the recorded reason. */
export interface AskPin {
  note: string;
}

/** Prune a run. Nothing is deleted unless `dry_run` is false. */
export interface AskPrune {
  dry_run: boolean;
}

/** Continue in a new attempt, with `gpus` GPUs if given. */
export interface AskRelaunch {
  force: boolean;
  gpus?: number | null;
}

/** An attempt with errors, to choose from. `launches` are those that crashed or hung. */
export interface AttemptErrors {
  number: number;
  state: string;
  cause: string | null;
  launches: number[];
}

/** One node of an attempt; `age_s` is the age of its heartbeat by the server's clock. */
export interface AttemptNode {
  node: number;
  host: string;
  time: string;
  age_s: number;
  launch: number;
  memory_percent: number | null;
  gpus: Record<string, unknown>[];
  ranks: RankRow[];
}

/** One attempt; `last_step` is the last step that any rank finished, committed or not. `world_size` is its number of ranks, and `gpus` its size as `elastic` counts it. */
export interface AttemptView {
  number: number;
  state: string;
  cause: string | null;
  evidence: string[];
  reason: string | null;
  executor: string | null;
  job_id: string | null;
  nodes: string[];
  world_size: number;
  gpus: number;
  command_digest: string | null;
  resumed_from: string | null;
  resumed_step: number | null;
  first_step: number | null;
  last_step: number | null;
  committed_step: number | null;
  steps: number | null;
  launches: LaunchView[];
  submitted_at: string | null;
  started_at: string | null;
  stop_requested_at: string | null;
  stop_committed_at: string | null;
  ended_at: string | null;
  signal_to_commit_s: number | null;
  failed_rank: number | null;
  traceback: string | null;
  code_commit: string | null;
  code_digest: string | null;
  config_digest: string | null;
  data_digest: string | null;
  environment_digest: string | null;
}

/** Something that needs a person: its cause, since when it is known, and what helps. `run` and `uid` are null for a problem of a root. `since` is null if only the present is known. `id` stays the same until the problem is solved, also over restarts of the server. */
export interface AttentionItem {
  id: string;
  run: string | null;
  uid: string | null;
  kind: string;
  level: "bad" | "warn";
  text: string;
  since: string | null;
  action: string;
  acknowledged: Acknowledged | null;
}

/** The GPUs that are free now for the attempts of a run, at its first choice of resources. `gpus_free` is null if they are not limited, or if the scheduler did not answer: `problem` is the reason then. `where` names the partition, or the executor. */
export interface Capacity {
  gpus_free: number | null;
  where: string;
  problem: string | null;
}

/** Why an attempt ended. The cause comes from records, never from an exit code alone. */
export type Cause = "preemption" | "time_limit" | "node_failure" | "hang" | "host_oom" | "gpu_oom" | "storage_full" | "numerics" | "user_error" | "infrastructure" | "operator" | "unknown";

/** One checkpoint, its manifest, its consumers, and the commands that continue from it. */
export interface CheckpointDetail {
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
  launch: number;
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
  metrics: Record<string, unknown>;
  versions: Record<string, unknown>;
  topology: Record<string, unknown>;
  pinned_by: string | null;
  pinned_at: string | null;
  pin_note: string | null;
  deleted_by: string | null;
  tags: string[];
  note: string | null;
  note_by: string | null;
  note_at: string | null;
  verified_ok: boolean | null;
  verified_at: string | null;
  verified_by: string | null;
  mirrored_at: string | null;
  is_best: boolean;
  on_disk: boolean;
  mirror: string | null;
  has_mirror: boolean;
  manifest: Record<string, unknown> | null;
  manifest_files: FileView[];
  consumers: ConsumerView[];
  commands: Record<string, string>;
}

/** One row of `holdfast checkpoints RUN`, with the checkpoint's durability status. `is_best` is true for the one that `RUN:best` names, by the spec's `checkpoint.keep.best`. */
export interface CheckpointRow {
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
  launch: number;
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
  metrics: Record<string, unknown>;
  versions: Record<string, unknown>;
  topology: Record<string, unknown>;
  pinned_by: string | null;
  pinned_at: string | null;
  pin_note: string | null;
  deleted_by: string | null;
  tags: string[];
  note: string | null;
  note_by: string | null;
  note_at: string | null;
  verified_ok: boolean | null;
  verified_at: string | null;
  verified_by: string | null;
  mirrored_at: string | null;
  is_best: boolean;
}

/** The state of a checkpoint in the index. */
export type CheckpointState = "committed" | "damaged" | "deleted";

/** A comparison of two checkpoints; `config` contains all keys of their runs' specs. */
export interface Comparison {
  one: string;
  other: string;
  common_ancestor: string | null;
  facts: Fact[];
  config: Fact[];
  metrics: Fact[];
}

/** A consumer of one checkpoint, and what became of it. `event` is that of the spec. `log` is the file with the output of the last start, null before the first one. `metrics` are those that the consumer reported. */
export interface ConsumerView {
  name: string;
  event: string;
  checkpoint: string;
  step: number;
  state: string;
  tries: number;
  start: number;
  log: string | null;
  reason: string;
  changed_at: string;
  metrics: Record<string, number | string>;
}

/** The rank that failed first in a crashed launch. `signal` names the signal that killed it, such as `signal 9 (SIGKILL)`. Otherwise `exit_code` is its exit status. */
export interface Crash {
  attempt: number;
  launch: number;
  rank: number;
  host: string | null;
  signal: string | null;
  exit_code: number | null;
}

/** A fact that differs between two launches. Null: it is not recorded, or not set. */
export interface DifferingFact {
  name: string;
  before: string | null;
  now: string | null;
}

export interface Edge {
  from: string;
  to: string;
  kind: string;
}

/** An empty request body. */
export interface Empty {
}

/** One error, or equal errors of several ranks. */
export interface ErrorEntry {
  attempt: number;
  launch: number | null;
  source: ErrorSource;
  kind: string;
  is_first: boolean;
  is_secondary: boolean;
  text: string;
  ranks: string;
  ranks_count: number;
  hosts: string[];
  signal: string | null;
  exit_code: number | null;
  at: string | null;
  until: string | null;
  clock: string | null;
  traceback: string | null;
  file: string | null;
}

/** Which record tells of an error. */
export type ErrorSource = "rank" | "torchrun" | "agent" | "flusher" | "supervisor" | "journal";

/** The kinds of journal lines. `holdfast_docs.event_book` describes each and its `data`. */
export type EventKind = "supervised" | "attempt_reserved" | "attempt_submitted" | "attempt_state" | "attempt_ended" | "successor_submitted" | "successor_adopted" | "successor_withdrawn" | "decision" | "operator_request" | "order_state" | "run_ended" | "pinned" | "unpinned" | "checkpoint_deleted" | "forked" | "exported" | "imported" | "rolled_back" | "numerics" | "claimed" | "launch_started" | "launch_ended" | "signal" | "notice" | "stop_agreed" | "stop_failed" | "loading" | "resumed" | "staged" | "committed" | "save_failed" | "mirrored" | "mirror_failed" | "fetched" | "verified" | "node_lost" | "tracked" | "goodput" | "hang_suspected" | "hang_cleared" | "hang_confirmed" | "straggler" | "node_silent" | "node_slow" | "link_slow" | "slowdown_tested" | "protection" | "node_unhealthy" | "limit_passed" | "alert_acknowledged" | "metric_missing" | "metric" | "annotated" | "consumer" | "audit" | "note";

/** One journal line. */
export interface EventView {
  run: string;
  journal: string;
  opening: number;
  sequence: number;
  attempt: number | null;
  time: string;
  kind: string;
  data: Record<string, unknown>;
}

/** The format of an export. */
export type ExportFormat = "torch" | "safetensors" | "hf" | "dcp";

/** One fact of two checkpoints; `is_same` is null if it is unknown for either of them. */
export interface Fact {
  name: string;
  one: unknown;
  other: unknown;
  is_same: boolean | null;
}

/** A save that was not committed; `at` is Unix seconds. */
export interface FailedSave {
  checkpoint: string;
  step: number;
  error: string;
  at: number;
}

/** One file of a checkpoint. */
export interface FileView {
  path: string;
  bytes: number;
  checksum: string;
}

/** The values of runs by which they can be filtered, sorted, `FILTER_VALUES_MAX` of each. */
export interface FilterValues {
  users: string[];
  causes: string[];
  partitions: string[];
  accounts: string[];
  tags: string[];
}

/** Ranks that are at the same call in a process group, by their flight records. */
export interface FlightGroup {
  group: string;
  ranks: string;
  ranks_count: number;
  call: string;
  state: string;
  place: string;
  is_odd: boolean;
}

/** A new run that was forked from a checkpoint. */
export interface Forked {
  run: string;
  uid: string;
  directory: string;
  forked_from: string;
  flow_run?: string | null;
  url?: string | null;
  pid?: number | null;
}

/** The totals of one user, partition, account or tag. `name` is null for Slurm's default partition or account, and for the runs without a tag. */
export interface GoodputGroup {
  name: string | null;
  totals: GoodputTotals;
}

/** The goodput of all matching runs: seconds by part, GPU hours and lost steps. `ettr` is productive time divided by total time, or null if the total is 0. */
export interface GoodputTotals {
  runs: number;
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
  ettr: number | null;
  steps_lost: number;
  gpu_hours: number;
  preemption_gpu_hours: number;
  money: Money[];
}

/** The GPUs of a node over time. Bucket `n` begins at `start_s` + `n` × `bucket_s`. */
export interface GpuSeries {
  run: string;
  attempt: number;
  nodes: SeriesNode[];
  node: number | null;
  start_s: number;
  bucket_s: number;
  buckets: number;
  gpus: GpuTrack[];
  problems: string[];
}

/** A GPU over time: one number for each bucket, null without data. `ecc_errors` counts new uncorrected errors, and `xids` has the code of a new Xid error, 0 without one. */
export interface GpuTrack {
  index: number;
  uuid: string;
  memory_total_bytes: number | null;
  utilisation_percent: (number | null)[];
  memory_bytes: (number | null)[];
  temperature_c: (number | null)[];
  power_w: (number | null)[];
  ecc_errors: (number | null)[];
  xids: (number | null)[];
}

/** The output of `holdfast lineage RUN`. The nodes are runs, attempts, checkpoints, paths, and the consumers of checkpoints. */
export interface Graph {
  nodes: Node[];
  edges: Edge[];
  nodes_total?: number;
}

/** The health of the server. `ingest_lag_s` and `round_s` are seconds. */
export interface Health {
  ok: boolean;
  version: string;
  database: string;
  ingest_lag_s: number | null;
  round_s: number;
  streams: number;
  roots: Record<string, boolean>;
  problems: Record<string, string>;
}

/** The nodes and ranks of an attempt, from the nodes' heartbeats. */
export interface Heartbeats {
  run: string;
  attempt: number | null;
  nodes: AttemptNode[];
  clock_problems: string[];
}

/** The ranks that a node had last. */
export interface HeatHost {
  node: number;
  host: string;
  first_rank: number;
  ranks: number;
}

/** A launch, and when its first bucket began, in Unix seconds. */
export interface HeatLaunch {
  launch: number;
  start_s: number;
}

/** One value of each rank over time. Bucket `n` begins at `start_s` + `n` × `bucket_s`, in Unix seconds. `rows` has a text for each rank from `first_rank` on, with one character for each bucket. The character number `k` of `alphabet` stands for `lowest_s` × `ratio` to the power of `k` − 1, and number 0 for no value. */
export interface HeatMap {
  run: string;
  attempt: number;
  value: HeatValue;
  start_s: number;
  bucket_s: number;
  buckets: number;
  first_rank: number;
  ranks_total: number;
  alphabet: string;
  lowest_s: number;
  ratio: number;
  rows: string[];
  hosts: HeatHost[];
  launches: HeatLaunch[];
  worst: RankMeans[];
  problems: string[];
}

/** What a heat map of the ranks shows, in seconds per step. `step` is the whole step, `data` the wait for the next batch, `others` the wait for other ranks, and `own` the step without the wait for others. */
export type HeatValue = "step" | "data" | "others" | "own";

/** A background job, such as a verification or an export. `result` is set once `state` is `done`. `created_at` and `ended_at` are Unix seconds. */
export interface JobRow {
  id: string;
  kind: string;
  about: string;
  by: string;
  state: "waiting" | "running" | "done" | "failed";
  done_bytes: number;
  total_bytes: number | null;
  result: Record<string, unknown> | null;
  error: string | null;
  created_at: number;
  ended_at: number | null;
}

/** What differs between the launch that failed and the last one before it that worked. A launch worked if it finished a step that no launch before it had, or committed a checkpoint. */
export interface LaunchDifference {
  failed: LaunchName;
  worked: LaunchName | null;
  reached: string;
  facts: DifferingFact[];
  left_out: number;
}

/** A launch. `number` is null for an attempt without one. */
export interface LaunchName {
  attempt: number;
  number: number | null;
}

/** One launch of torchrun inside an attempt. */
export interface LaunchView {
  number: number;
  world_size: number | null;
  command_digest: string | null;
  resumed_from: string | null;
  first_step: number | null;
  last_step: number | null;
  started_at: string | null;
  ended_at: string | null;
  ending: string | null;
  exit_code: number | null;
}

/** A log file: one output stream of one rank in one launch. */
export interface LogFile {
  attempt: number;
  node: string;
  launch: number;
  rank: number;
  stream: string;
  bytes: number;
}

/** The token to log in with. */
export interface LogIn {
  token: string;
}

/** The process that wrote a log file. */
export type LogKind = "rank" | "torchrun" | "agent" | "flusher" | "supervisor";

/** A line that a search found, at the byte `offset`. Of a long line, a part is returned. */
export interface LogMatch {
  file: string;
  kind: LogKind;
  attempt: number | null;
  node: number | null;
  launch: number | null;
  rank: number | null;
  stream: string | null;
  offset: number;
  text: string;
}

/** A part of a log. The next part begins at `next_offset`, even if it is not written yet. */
export interface LogPart {
  run: string;
  attempt: number;
  rank: number;
  stream: string;
  launch: number;
  offset: number;
  next_offset: number;
  bytes: number;
  text: string;
  ended: boolean;
}

/** The lines that one request of a search found; `next` continues it, null at the end. */
export interface LogSearch {
  matches: LogMatch[];
  next: string | null;
  searched_bytes: number;
  searched_files: number;
}

/** Totals in one currency; a value is null if no run in this currency has the price. */
export interface Money {
  currency: string;
  cost: number | null;
  preemption_cost: number | null;
  on_demand_cost: number | null;
  saved: number | null;
}

/** A node of the graph. Every node has `id` and `kind`; the other keys depend on the kind. */
export interface Node {
  id?: string;
  kind?: string;
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
  count?: number;
  first_step?: number;
  last_step?: number;
  consumer?: string;
}

/** The newest faults of a machine. */
export interface NodeDetail {
  host: string;
  faults: NodeFault[];
}

/** An attempt's failure that is attributed to a machine. */
export interface NodeFault {
  run: string;
  attempt: number;
  cause: string;
  started_at: string | null;
  ended_at: string | null;
}

/** A machine: the number of its attempts and of the failures attributed to it, by cause. */
export interface NodeRow {
  host: string;
  attempts: number;
  failures: number;
  faults: Record<string, number>;
  last_started_at: string | null;
  last_failed_at: string | null;
}

/** An alert about ranks, nodes or losses, such as a hang; `at` is Unix seconds. */
export interface Noticed {
  kind: string;
  attempt: number | null;
  at: number;
  text: string;
  dumps: string[];
}

/** An operator's request for a run; `at` is Unix seconds. `after_attempt` is the newest attempt at that time. It is 0 before the first attempt. `number` is the number of the order. `state` is pending, taken, done, failed or overtaken, and `detail` is the reason for it. */
export interface OperatorRequest {
  number: number;
  action: string;
  by: string;
  at: number;
  gpus: number | null;
  after_attempt: number;
  state: OrderState;
  detail: string;
}

/** The state of an order. */
export type OrderState = "pending" | "taken" | "done" | "failed" | "overtaken";

/** The new pin state of a checkpoint. */
export interface Pinned {
  checkpoint: string;
  pinned: boolean;
}

/** A range of steps on a curve; `step` is its last step and `time_s` is Unix seconds. */
export interface Point {
  step: number;
  time: string;
  time_s: number;
  steps_per_s: number | null;
  values: Record<string, Spread>;
}

/** The body of every error response: `code` is for programs, `message` for people. */
export interface Problem {
  status: number;
  code: string;
  message: string;
  problems: string[];
  by?: string | null;
  action?: string | null;
  at?: number | null;
}

/** The output of `holdfast prune --json`. */
export interface Prune {
  run: string;
  dry_run: boolean;
  deleted: Verdict[];
  kept: Verdict[];
  bytes_deleted: number;
  bytes_kept: number;
}

/** A rank's mean seconds per step in the range of time. */
export interface RankMeans {
  rank: number;
  node: number;
  host: string;
  step_s: number | null;
  data_s: number | null;
  others_s: number | null;
  own_s: number | null;
  peers_s: number | null;
  slow_share: number;
  is_straggler: boolean;
}

/** One rank, from the newest heartbeat of its node. */
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

/** Metrics that were recorded for a checkpoint. */
export interface Reported {
  checkpoint: string;
  metrics: Record<string, number | string>;
}

/** What a token allows: `reader` may read, `operator` may also act. */
export type Role = "reader" | "operator";

/** The output of `holdfast show RUN --json`, with the progress of the live attempt. `steps_total` is null if neither the spec nor the program tells the number of steps. `gpus_fitting` are the allowed GPU counts at which the newest checkpoint can continue, or null if all of them are. `gpus_allowed` are the GPU counts that the spec allows, or null if they are too many to list. `unprotected` is empty unless the run is running and lacks what it was given. `saves_by_holdfast` is false if the program has no Session, and null if that is not known yet. `refusals` has the reason for each action that the run would refuse now. */
export interface RunDetail {
  run: string;
  name: string;
  uid: string;
  state: string;
  reason: string | null;
  root: string;
  path: string;
  spec: Record<string, unknown>;
  spec_digest: string;
  command_digest: string | null;
  step: number | null;
  goodput: Record<string, unknown>;
  stretches: StretchView[];
  attempts: AttemptView[];
  consumers: ConsumerView[];
  forked_from: string | null;
  flow_run: string | null;
  created_by: string;
  created_at: string;
  ended_at: string | null;
  tags: string[];
  note: string | null;
  note_by: string | null;
  note_at: string | null;
  on_disk: boolean;
  failed_saves: FailedSave[];
  noticed: Noticed[];
  live_step: number | null;
  step_s: number | null;
  supervision: Supervision | null;
  requests: OperatorRequest[];
  steps_total: number | null;
  gpus_min: number | null;
  gpus_max: number | null;
  gpus_fitting: number[] | null;
  gpus_allowed: number[] | null;
  saves_by_holdfast: boolean | null;
  unprotected: Unprotected[];
  successor: WaitingSuccessor | null;
  refusals: Record<string, string>;
  crashes: Crash[];
  trackers: TrackerRun[];
}

/** Why an attempt failed, and the attempts of its run that have errors. `first` is the first cause of the last launch with errors. `order_note` says how far the order of `entries` is certain. `unread` and `left_out` count what bounds have left out. */
export interface RunErrors {
  run: string;
  attempt: number | null;
  attempts: AttemptErrors[];
  first: ErrorEntry | null;
  entries: ErrorEntry[];
  left_out: number;
  unread: number;
  order_note: string;
  stacks: StackDump[];
  difference: LaunchDifference | null;
}

/** One row of the list of runs; a live run has its newest step and its seconds per step. */
export interface RunLine {
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
  spec_digest: string;
  forked_from: string | null;
  created_by: string;
  created_at: string;
  ended_at: string | null;
  tags: string[];
  partition: string | null;
  updated_at: string;
  committed_at: string | null;
  steps_total: number | null;
  goodput: Record<string, unknown>;
  spark: number[];
  live_step: number | null;
  step_s: number | null;
}

/** A log file and its size; `changed_at` is Unix seconds. */
export interface RunLog {
  file: string;
  kind: LogKind;
  attempt: number | null;
  node: number | null;
  launch: number | null;
  rank: number | null;
  stream: string | null;
  bytes: number;
  changed_at: number;
}

/** A part of a log file. The next part begins at `next_offset`, even if it is not written yet. `ended` is true once the attempt has ended and the log is complete. */
export interface RunLogPart {
  run: string;
  file: string;
  offset: number;
  next_offset: number;
  bytes: number;
  text: string;
  ended: boolean;
}

/** One page of runs. The first page also lists the folders of runs that cannot be read. Only the names of such runs are known, so they are listed only if the request filters by neither state nor time. A run that could be read earlier is also among the items, with its last known values. */
export interface RunPage {
  items: RunLine[];
  next: string | null;
  unreadable: UnreadableRun[];
}

/** The state of a run, over all its attempts. */
export type RunState = "queued" | "running" | "waiting" | "paused" | "completed" | "failed" | "cancelled";

/** A comparison of runs. `left_out` is how many equal facts were too many to list. */
export interface RunsComparison {
  runs: string[];
  facts: RunsFact[];
  left_out: number;
}

/** One fact of several runs, in their order; `is_same` is null if it is unknown for one. `group` is arguments, settings, code, environment or outcome. An absent setting is null. */
export interface RunsFact {
  group: string;
  name: string;
  values: unknown[];
  is_same: boolean | null;
}

/** A period in which an attempt did one thing; `part` is one of `contracts.goodput.PARTS`. */
export interface Segment {
  attempt: number;
  part: string;
  began_at: string;
  ended_at: string;
}

/** The metrics of one launch, oldest first. */
export interface Series {
  attempt: number;
  launch: number;
  points: Point[];
}

/** A node whose GPUs have a series. */
export interface SeriesNode {
  node: number;
  host: string;
}

/** The caller of this request and the CSRF token of its browser session. */
export interface Session {
  name: string | null;
  role: Role | null;
  csrf: string | null;
  version: string;
}

/** The last, lowest and highest value of a metric in a range of steps. They are null if no value was finite. */
export interface Spread {
  last: number | null;
  low: number | null;
  high: number | null;
}

/** The stacks of one suspected hang, from all nodes, the largest group first. */
export interface StackDump {
  attempt: number;
  launch: number | null;
  number: number;
  at: string | null;
  state: string;
  finding: string;
  groups: StackGroup[];
  flights: FlightGroup[];
  flight_finding: string | null;
  files: string[];
  unread: number;
}

/** Ranks with the same stack. `frames` are those of the main thread, innermost first. */
export interface StackGroup {
  ranks: string;
  ranks_count: number;
  frames: string[];
  waits: boolean;
  is_odd: boolean;
  problem: string | null;
}

/** The storage of a run's checkpoints, and what the next prune would delete. */
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

/** Checkpoints and bytes of all matching runs, by state. */
export interface StorageTotals {
  runs: number;
  kept: number;
  kept_bytes: number;
  damaged: number;
  damaged_bytes: number;
  deleted: number;
  deleted_bytes: number;
}

/** The time and cost of attempts in a row at one place of `resources`: `contracts.stretches`. */
export interface StretchView {
  place: number;
  name: string;
  first: number;
  last: number;
  began_at: number;
  ended_at: number;
  ettr: number;
  steps_lost: number;
  gpu_hours: number;
  cost: number | null;
  preemption_cost: number | null;
  on_demand_cost: number | null;
  saved: number | null;
  currency: string | null;
}

/** The supervisor of a live run that is not paused. `is_alive` is false if no process holds the run's lock. It is null while a supervisor may still be starting, and for the run of another user, whose lock the server cannot read. `host` and `pid` are those of the newest supervisor. If `is_remote` is true, that host is another one, and its lock may not be visible from this server. */
export interface Supervision {
  is_alive: boolean | null;
  is_remote: boolean;
  host: string | null;
  pid: number | null;
}

/** The run of an experiment tracker; `url` is null if the tracker has no web page of it. */
export interface TrackerRun {
  tracker: string;
  tracker_id: string;
  url: string | null;
}

/** Something that a running launch lacks, so that the loss of a node costs more than expected. `lacks` is `copies` of a node's snapshots at its neighbour, or `spares`: all spare nodes are used. `host` is null if it concerns all nodes. `text` is the cause, and `action` what helps. `at` is Unix seconds. */
export interface Unprotected {
  lacks: "copies" | "spares";
  host: string | null;
  text: string;
  action: string;
  at: number;
}

/** A run's folder that cannot be read, and the reason. */
export interface UnreadableRun {
  run: string;
  path: string;
  reason: string;
}

/** A checkpoint that a prune keeps or deletes, and the reason. */
export interface Verdict {
  checkpoint: string;
  step: number;
  bytes: number;
  reason: string;
}

/** A run whose job is pending, or that waits between two attempts. `since` is when the job was submitted, or when the last attempt ended. `starts_at` is Slurm's forecast. `gpus` is the size of the job, and null before the first one. */
export interface WaitingRun {
  run: string;
  uid: string;
  state: string;
  user: string;
  partition: string | null;
  gpus: number | null;
  job_id: string | null;
  since: string | null;
  reason: string | null;
  starts_at: string | null;
  action: string;
}

/** The job that waits in the queue to follow the attempt `after_attempt`. `submitted_at` is Unix seconds. It and `job_id` are null while no answer of Slurm is known. */
export interface WaitingSuccessor {
  number: number;
  job_id: string | null;
  after_attempt: number;
  gpus: number;
  submitted_at: number | null;
}
