// The queries of each view, with their keys and polling.
import { keepPreviousData, useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { get, withQuery } from "./client";
import { pollMs } from "./live";
import type {
  Ancestor, Checkpoint, CheckpointDetail, Comparison, Event, GoodputTotals, Graph, Heartbeats,
  LogFile, LogPart, NodeFault, NodeRow, Page, Run, RunPage, Segment, Series, StorageRow,
  StorageTotals,
} from "./types";

const PAGE = 50;
const HOSTS_PAGE = 500;
const CHECKPOINTS_PAGE = 100;
const CHECKPOINTS_DRAWN = 500;
const BEAT_MS = 2_000;

const at = (run: string) => `/runs/${encodeURIComponent(run)}`;
const refetchInterval = pollMs;

/** The column by which the server sorts a list. */
export interface Sort {
  sort: string;
  order?: "asc" | "desc" | undefined;
}

export const useRuns = (where: { search?: string; state?: string } & Partial<Sort>) =>
  useInfiniteQuery({
    queryKey: ["runs", where],
    queryFn: ({ pageParam }) =>
      get<RunPage>(withQuery("/runs", { ...where, after: pageParam, limit: PAGE })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useRun = (run: string) =>
  useQuery({ queryKey: ["run", run, "show"], queryFn: () => get<Run>(at(run)), refetchInterval });

const checkpointsOf = (run: string, limit: number, after: string | null = null) =>
  get<Page<Checkpoint>>(
    withQuery(`${at(run)}/checkpoints`, { newest_first: "true", limit, after }),
  );

/** The pages of a run's checkpoints, newest first. */
export const useCheckpoints = (run: string) =>
  useInfiniteQuery({
    queryKey: ["run", run, "checkpoints"],
    queryFn: ({ pageParam }) => checkpointsOf(run, CHECKPOINTS_PAGE, pageParam),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    refetchInterval,
  });

/** The newest checkpoints of a run, for its timeline. */
export const useNewestCheckpoints = (run: string) =>
  useQuery({
    queryKey: ["run", run, "newest checkpoints"],
    queryFn: async () => (await checkpointsOf(run, CHECKPOINTS_DRAWN)).items,
    refetchInterval,
  });

/** The segments of each attempt, as counted in the run's goodput. */
export const useTimeline = (run: string) =>
  useQuery({
    queryKey: ["run", run, "timeline"],
    queryFn: () => get<Segment[]>(`${at(run)}/timeline`),
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
    queryFn: () => get<Series[]>(`${at(run)}/metrics`),
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
    queryFn: () => get<Ancestor[]>(`${ofCheckpoint(id)}/ancestry`),
    refetchInterval,
  });

export const useComparison = (a: string | undefined, b: string | undefined) =>
  useQuery({
    queryKey: ["compare", a, b],
    queryFn: () => get<Comparison>(withQuery("/compare", { a, b })),
    enabled: Boolean(a && b),
  });

export const useNodes = () =>
  useInfiniteQuery({
    queryKey: ["nodes"],
    queryFn: ({ pageParam }) =>
      get<Page<NodeRow>>(withQuery("/nodes", { after: pageParam, limit: HOSTS_PAGE })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    refetchInterval,
  });

/** The newest attempts that failed because of a machine. */
export const useFaults = (host: string) =>
  useQuery({
    queryKey: ["nodes", host],
    queryFn: () => get<{ faults: NodeFault[] }>(`/nodes/${encodeURIComponent(host)}`),
    refetchInterval,
  });

export const useStorage = (by: Sort) =>
  useInfiniteQuery({
    queryKey: ["storage", by],
    queryFn: ({ pageParam }) =>
      get<Page<StorageRow>>(withQuery("/storage", { ...by, after: pageParam, limit: PAGE })),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useStorageTotals = () =>
  useQuery({
    queryKey: ["storage", "totals"],
    queryFn: () => get<StorageTotals>("/storage/totals"),
    refetchInterval,
  });

export const useGoodputTotals = () =>
  useQuery({
    queryKey: ["goodput"],
    queryFn: () => get<GoodputTotals>("/goodput"),
    refetchInterval,
  });
