// The queries of several runs beside each other, and of the pickers of runs and checkpoints.
import { keepPreviousData, useQueries, useQuery } from "@tanstack/react-query";
import { BASE, get, withQuery } from "./client";
import { pollMs } from "./live";
import { runOptions } from "./queries";
import type { Checkpoint, Page, Run, RunPage, RunsComparison, Series } from "./types";

const LISTED = 20;
const CHECKPOINTS_LISTED = 50;
const at = (run: string) => `/runs/${encodeURIComponent(run)}`;

interface Several<T> {
  data: (T | undefined)[];
  /** The error of the first one that could not be loaded. */
  error: Error | null;
}

/** The answers of several queries, which stay the same object until one of them changes. */
const together = <T>(results: { data: T | undefined; error: Error | null }[]): Several<T> => ({
  data: results.map((one) => one.data),
  error: results.find((one) => one.data === undefined && one.error)?.error ?? null,
});

/** Several runs, in the same order. */
export const useRunsTogether = (runs: string[]) =>
  useQueries({ queries: runs.map(runOptions), combine: together<Run> });

/** The metrics of several runs, in the same order. */
export const useSeveralMetrics = (runs: string[]) =>
  useQueries({
    combine: together<Series[]>,
    queries: runs.map((run) => ({
      queryKey: ["run", run, "metrics"],
      queryFn: () => get<Series[]>(`${at(run)}/metrics`),
      refetchInterval: pollMs,
    })),
  });

export const useRunsComparison = (runs: string[]) =>
  useQuery({
    queryKey: ["compare", "runs", ...runs],
    queryFn: () => get<RunsComparison>(withQuery("/compare/runs", { run: runs })),
    enabled: runs.length > 0,
    placeholderData: keepPreviousData,
    refetchInterval: pollMs,
  });

/** The runs whose names contain `search`. */
export const useRunChoices = (search: string, isOpen: boolean) =>
  useQuery({
    queryKey: ["runs", "choices", search],
    queryFn: async () =>
      (await get<RunPage>(withQuery("/runs", { search, limit: LISTED }))).items,
    enabled: isOpen,
    placeholderData: keepPreviousData,
  });

/** The newest committed checkpoints of a run, or those of a step. */
export const useCheckpointChoices = (run: string, step: number | null, isOpen: boolean) =>
  useQuery({
    queryKey: ["run", run, "choices", step],
    queryFn: async () => (await get<Page<Checkpoint>>(withQuery(`${at(run)}/checkpoints`, {
      newest_first: "true", limit: CHECKPOINTS_LISTED, step_from: step, step_to: step,
    }))).items,
    enabled: isOpen && run !== "",
    placeholderData: keepPreviousData,
  });

/** The address of curves as a file. */
export const curvesFile = (run: string[], format: string, name?: string) =>
  BASE + withQuery("/tables/curves", { run, name, format });
