// What each view asks the server, under which key, and how it is kept up to date.
import { keepPreviousData, useInfiniteQuery, useQueries, useQuery } from "@tanstack/react-query";
import { get, withQuery } from "./client";
import { pollMs } from "./live";
import type {
  Checkpoint, CheckpointDetail, Comparison, Event, Graph, Heartbeats, LogFile, LogPart, Metrics,
  NodeRow, Page, Run, RunRow, StorageRow,
} from "./types";

const PAGE = 50;
const PAGES_MAX = 40;
const CHECKPOINTS_PAGE = 500;
const BEAT_MS = 2_000;

const at = (run: string) => `/runs/${encodeURIComponent(run)}`;
const refetchInterval = pollMs;

export const useRuns = (where: { search?: string; state?: string }) =>
  useInfiniteQuery({
    queryKey: ["runs", where],
    queryFn: ({ pageParam }) =>
      get<Page<RunRow>>(withQuery("/runs", { ...where, after: pageParam, limit: PAGE })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useRun = (run: string) =>
  useQuery({ queryKey: ["run", run, "show"], queryFn: () => get<Run>(at(run)), refetchInterval });

/** Several runs whole, each asked for by itself; undefined where one has not come yet. */
export const useRunDetails = (runs: string[]) =>
  useQueries({
    queries: runs.map((run) => ({
      queryKey: ["run", run, "show"],
      queryFn: () => get<Run>(at(run)),
      refetchInterval,
    })),
    combine: (results) => results.map((one) => one.data),
  });

/** All checkpoints of a run, oldest first; so many pages at most that the browser bears them. */
export const useAllCheckpoints = (run: string) =>
  useQuery({
    queryKey: ["run", run, "checkpoints"],
    queryFn: async () => {
      const found: Checkpoint[] = [];
      let after: string | null = null;
      for (let page = 0; page < PAGES_MAX; page += 1) {
        const part: Page<Checkpoint> = await get(
          withQuery(`${at(run)}/checkpoints`, { after, limit: CHECKPOINTS_PAGE }),
        );
        found.push(...part.items);
        after = part.next;
        if (!after) break;
      }
      return found;
    },
    refetchInterval,
  });

export const useEvents = (run: string, kind: string) =>
  useInfiniteQuery({
    queryKey: ["run", run, "events", kind],
    queryFn: ({ pageParam }) =>
      get<Page<Event>>(withQuery(`${at(run)}/events`, { kind, after: pageParam, limit: PAGE * 2 })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useMetrics = (run: string) =>
  useQuery({
    queryKey: ["run", run, "metrics"],
    queryFn: () => get<Metrics>(`${at(run)}/metrics`),
    refetchInterval,
  });

export const useHeartbeats = (run: string, live: boolean) =>
  useQuery({
    queryKey: ["run", run, "heartbeats"],
    queryFn: () => get<Heartbeats>(`${at(run)}/heartbeats`),
    refetchInterval: live ? BEAT_MS : refetchInterval,
  });

export const useLogFiles = (run: string, attempt: string | undefined) =>
  useQuery({
    queryKey: ["run", run, "logs", attempt ?? ""],
    queryFn: () => get<LogFile[]>(withQuery(`${at(run)}/logs`, { attempt })),
    refetchInterval,
  });

export const askLog = (
  run: string,
  rank: number,
  query: Record<string, string | number | undefined>,
) => get<LogPart>(withQuery(`${at(run)}/logs/${rank}`, query));

export const useGraph = (run: string) =>
  useQuery({
    queryKey: ["run", run, "lineage"],
    queryFn: () => get<Graph>(`${at(run)}/lineage`),
    refetchInterval,
  });

const ofCheckpoint = (id: string) => `/checkpoints/${encodeURIComponent(id)}`;

export const useCheckpoint = (id: string) =>
  useQuery({
    queryKey: ["checkpoint", id],
    queryFn: () => get<CheckpointDetail>(ofCheckpoint(id)),
    refetchInterval,
  });

export const useAncestry = (id: string) =>
  useQuery({
    queryKey: ["checkpoint", id, "ancestry"],
    queryFn: () => get<Checkpoint[]>(`${ofCheckpoint(id)}/ancestry`),
    refetchInterval,
  });

export const useComparison = (a: string | undefined, b: string | undefined) =>
  useQuery({
    queryKey: ["compare", a, b],
    queryFn: () => get<Comparison>(withQuery("/compare", { a, b })),
    enabled: Boolean(a && b),
  });

export const useNodes = () =>
  useQuery({ queryKey: ["nodes"], queryFn: () => get<Page<NodeRow>>("/nodes"), refetchInterval });

export const useStorage = () =>
  useQuery({
    queryKey: ["storage"],
    queryFn: () => get<Page<StorageRow>>(withQuery("/storage", { limit: PAGE * 2 })),
    refetchInterval,
  });
