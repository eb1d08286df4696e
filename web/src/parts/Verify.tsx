// Every byte of a checkpoint read and compared with what was committed, watched while it goes on.
import { useMutation, useQuery } from "@tanstack/react-query";
import { get, post } from "../api/client";
import type { Job } from "../api/types";
import { count, percent } from "../format";
import { Problem, State } from "./basics";

const ASK_MS = 500;

const isOver = (job: Job | undefined): boolean => job?.state === "done" || job?.state === "failed";

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
  const begin = useMutation({
    mutationFn: () => post<Job>(`/checkpoints/${encodeURIComponent(id)}/verify`),
  });
  const asked = begin.data?.id;
  const watch = useQuery({
    queryKey: ["job", asked],
    queryFn: () => get<Job>(`/jobs/${asked}`),
    enabled: asked !== undefined,
    refetchInterval: ({ state }) => (isOver(state.data) ? false : ASK_MS),
  });
  const job = watch.data ?? begin.data;
  const error = begin.error ?? watch.error;
  return (
    <>
      {error ? <Problem error={error} /> : null}
      <span role="status">{job ? verdict(job) : null}</span>
      <button
        type="button"
        disabled={begin.isPending || (job !== undefined && !isOver(job))}
        onClick={() => begin.mutate()}
      >
        Verify
      </button>
    </>
  );
}
