// A button for a long job, with its progress until it has ended.
import { useMutation, useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { get, post } from "../api/client";
import type { Job } from "../api/types";
import { Problem } from "./basics";

const ASK_MS = 500;

const isOver = (job: Job | undefined): boolean => job?.state === "done" || job?.state === "failed";

interface Asked {
  word: string;
  path: string;
  body?: Record<string, unknown>;
  /** Renders the job's current state. */
  say: (job: Job) => ReactNode;
}

export function JobButton({ word, path, body, say }: Asked) {
  const begin = useMutation({ mutationFn: () => post<Job>(path, body) });
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
      <span role="status">{job ? say(job) : null}</span>
      <button
        type="button"
        disabled={begin.isPending || (job !== undefined && !isOver(job))}
        onClick={() => begin.mutate()}
      >
        {word}
      </button>
    </>
  );
}
