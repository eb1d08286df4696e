// Values for the unit tests of the page.
import type { Attempt, Launch } from "./api/types";

export const attempt = (fields: Partial<Attempt>): Attempt => ({
  number: 1, state: "running", cause: null, evidence: [], reason: "first", executor: null,
  job_id: null, nodes: [], world_size: 2, command_digest: null, resumed_from: null,
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
