// Verification of a checkpoint, which reads every byte, with its progress.
import type { Job } from "../api/types";
import { count, percent } from "../format";
import { JobButton } from "./Job";
import { State } from "./basics";

function verdict(job: Job) {
  if (job.state === "failed") return <State state="failed">{job.error ?? "failed"}</State>;
  if (job.state !== "done") {
    const share = job.total_bytes ? job.done_bytes / job.total_bytes : null;
    return <State state="running">verifying {share === null ? "" : percent(share)}</State>;
  }
  if (job.result?.ok) return <State state="verified" />;
  return <State state="damaged">{count(job.result?.damaged?.length ?? 1)} files damaged</State>;
}

export function Verify({ id }: { id: string }) {
  return (
    <JobButton word="Verify" path={`/checkpoints/${encodeURIComponent(id)}/verify`} say={verdict} />
  );
}
