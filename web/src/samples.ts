// Values for the unit tests of the page.
import type {
  AttentionItem, CheckpointDetail, CheckpointRow, ErrorEntry, RunDetail, RunErrors, RunLine,
} from "./api/schema";
import type { Attempt, Goodput, Launch } from "./api/types";

/** The id of the sample checkpoint. */
export const ID = "gpt:step-00000200.a0001.l01";

export const attempt = (fields: Partial<Attempt>): Attempt => ({
  number: 1, state: "running", cause: null, evidence: [], reason: "first", executor: null,
  job_id: null, nodes: [], world_size: 2, gpus: 2, command_digest: null, resumed_from: null,
  resumed_step: null, first_step: null, last_step: null, committed_step: null, steps: null,
  launches: [], submitted_at: null, started_at: null, stop_requested_at: null,
  stop_committed_at: null, ended_at: null, signal_to_commit_s: null, failed_rank: null,
  traceback: null, code_commit: null, code_digest: null, config_digest: null, data_digest: null,
  environment_digest: null, ...fields,
});

export const launch = (fields: Partial<Launch>): Launch => ({
  number: 1, world_size: 2, command_digest: null, resumed_from: null, first_step: null,
  last_step: null, started_at: null, ended_at: null, ending: null, exit_code: null, ...fields,
});

const GOODPUT: Goodput = {
  total_s: 1800, queued_s: 60, starting_s: 30, loading_s: 10, training_s: 1500, lost_s: 100,
  blocked_s: 20, hung_s: 0, flushing_s: 30, stopped_s: 50, ettr: 0.833, steps_lost: 40,
  gpu_hours: 4, preemption_gpu_hours: 0.2, cost: null, preemption_cost: null,
  on_demand_cost: null, saved: null, currency: null,
};

const named = {
  name: "gpt", state: "running", reason: null, step: 200, root: "/runs", spec_digest: "d1",
  forked_from: null, created_by: "mia", created_at: "2026-01-01T10:00:00Z", ended_at: null,
  steps_total: 1000, goodput: GOODPUT, live_step: null, step_s: null,
};

/** A run in the list of runs. */
export const line = (name: string, fields: Partial<RunLine> = {}): RunLine => ({
  ...named, run: name, uid: `uid-${name}`, path: `/runs/${name}`, attempts: 1, world_size: 8,
  cause: null, job_id: null, partition: null, updated_at: "2026-01-01T10:30:00Z",
  committed_at: null, spark: [], tags: [],
  ...fields,
});

/** The run `gpt` with one live attempt. */
export const run = (fields: Partial<RunDetail>): RunDetail => ({
  ...named, run: "gpt", uid: "uid-gpt", path: "/runs/gpt", spec: {}, command_digest: null,
  attempts: [attempt({ started_at: "2026-01-01T10:00:00Z" })], flow_run: null, on_disk: true,
  failed_saves: [], noticed: [], supervision: null, requests: [], gpus_min: 1, gpus_max: 16,
  gpus_fitting: null, gpus_allowed: null, saves_by_holdfast: true, refusals: {}, crashes: [],
  unprotected: [],
  successor: null, stretches: [], consumers: [], trackers: [], tags: [], note: null,
  note_by: null, note_at: null,
  ...fields,
});

/** The checkpoint of step 200. */
export const checkpoint = (fields: Partial<CheckpointRow>): CheckpointRow => ({
  id: ID, run: "gpt", step: 200, path: "/runs/gpt/checkpoints/step-00000200.a0001.l01",
  state: "committed", reason: "the newest", saved_for: "interval", detail: null, parent: null,
  attempt: 1, launch: 1, world_size: 2, bytes: 4096, files: 2, checksum: null,
  command_digest: null, blocked_s: 0.01, flush_s: 1.5, staged_at: "2026-01-01T10:09:58Z",
  committed_at: "2026-01-01T10:10:00Z", deleted_at: null, pinned: false, rolled_back: false,
  metrics: {}, versions: {}, topology: {}, pinned_by: null, pinned_at: null, pin_note: null,
  tags: [], note: null, note_by: null, note_at: null, deleted_by: null, verified_ok: null,
  verified_at: null, verified_by: null, mirrored_at: null, is_best: false,
  ...fields,
});

export const detail = (fields: Partial<CheckpointDetail>): CheckpointDetail => ({
  ...checkpoint({}), on_disk: true, mirror: null, has_mirror: false, manifest: null,
  manifest_files: [], commands: {}, consumers: [], ...fields,
});

/** Something of the run `gpt` that needs a person. */
export const problemOf = (kind: string, fields: Partial<AttentionItem> = {}): AttentionItem => ({
  id: `uid-gpt:${kind}:1`, run: "gpt", uid: "uid-gpt", kind, level: "bad", since: null,
  text: `it is ${kind}`, action: `end the ${kind}`, acknowledged: null, ...fields,
});

/** The errors of the run `gpt`, which has none. */
export const errors = (fields: Partial<RunErrors>): RunErrors => ({
  run: "gpt", attempt: null, attempts: [], first: null, entries: [], left_out: 0, unread: 0,
  order_note: "", stacks: [], difference: null, ...fields,
});

/** An error of rank 0 in launch 1. */
export const failure = (fields: Partial<ErrorEntry>): ErrorEntry => ({
  attempt: 1, launch: 1, source: "rank", kind: "exception", is_first: false, is_secondary: false,
  text: "rank 0: ValueError: no", ranks: "0", ranks_count: 1, hosts: [], signal: null,
  exit_code: 1, at: null, until: null, clock: null, traceback: null, file: null, ...fields,
});
