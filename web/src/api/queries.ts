// The queries of each view, with their keys and polling.
import {
  keepPreviousData, queryOptions, useInfiniteQuery, useQueries, useQuery,
} from "@tanstack/react-query";
import { BASE, get, withQuery } from "./client";
import { readGoodput, type GroupBy } from "../goodput";
import { isLive } from "../states";
import { pollMs } from "./live";
import type {
  Ancestor, AttentionItem, Capacity, Checkpoint, CheckpointDetail, Comparison, Event, FilterValues,
  Goodput, GoodputGroup, GoodputTotals, Graph, Heartbeats, LogSearch, NodeFault, NodeRow, Page, Run,
  RunErrors, RunLog, RunLogPart, RunPage, Segment, Series, StorageRow, StorageTotals, WaitingRun,
} from "./types";

const PAGE = 50;
const HOSTS_PAGE = 500;
const CHECKPOINTS_PAGE = 100;
const CHECKPOINTS_DRAWN = 500;
const BEAT_MS = 2_000;
const LIVE_MS = 5_000;
const ATTENTION_MS = 3_000;
const FILTERS_MS = 60_000;
const CAPACITY_MS = 10_000;

const at = (run: string) => `/runs/${encodeURIComponent(run)}`;
const refetchInterval = pollMs;

/** One odd account of a run's time must not break the views of all others. */
const withGoodput = <T extends { goodput: unknown }>(run: T): T & { goodput: Goodput | null } =>
  ({ ...run, goodput: readGoodput(run.goodput) });

/** The column by which the server sorts a list. */
export interface Sort {
  sort: string;
  order?: "asc" | "desc" | undefined;
}

/** What the server filters runs by. */
export interface RunWhere {
  search?: string | undefined;
  state?: string | undefined;
  user?: string | undefined;
  cause?: string | undefined;
  partition?: string | undefined;
  account?: string | undefined;
  tag?: string | undefined;
  attention?: boolean | undefined;
  created_within?: number | undefined;
}

export const useRuns = (where: RunWhere & Partial<Sort>) =>
  useInfiniteQuery({
    queryKey: ["runs", where],
    queryFn: async ({ pageParam }) => {
      const page = await get<RunPage>(
        withQuery("/runs", { ...where, after: pageParam, limit: PAGE }));
      return { ...page, items: page.items.map(withGoodput) };
    },
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next,
    placeholderData: keepPreviousData,
    refetchInterval,
  });

/** What needs a person. No event announces that a process was killed, so the page asks. */
export const useAttention = () =>
  useQuery({
    queryKey: ["attention"],
    queryFn: () => get<AttentionItem[]>("/attention"),
    refetchInterval: ATTENTION_MS,
  });

/** The users, causes, partitions, accounts and tags by which runs can be filtered. */
export const useFilterValues = (enabled = true) =>
  useQuery({ queryKey: ["filters"], queryFn: () => get<FilterValues>("/filters"),
    staleTime: FILTERS_MS, enabled });

/** The GPUs that are free for a run now. Its scheduler's answer is a few seconds old at most. */
export const useCapacity = (run: string) =>
  useQuery({
    queryKey: ["run", run, "capacity"],
    queryFn: () => get<Capacity>(`${at(run)}/capacity`),
    staleTime: CAPACITY_MS,
    refetchInterval: CAPACITY_MS,
  });

export const runOptions = (run: string) => queryOptions({
  queryKey: ["run", run, "show"],
  queryFn: async () => withGoodput(await get<Run>(at(run))),
  // Goodput and supervision change without any event.
  refetchInterval: (query) => refetchInterval(query) ||
    (query.state.data && isLive(query.state.data.state) ? LIVE_MS : false),
});

export const useRun = (run: string) => useQuery(runOptions(run));

/** Several runs, in the same order. */
export const useSeveralRuns = (runs: string[]) => useQueries({ queries: runs.map(runOptions) });

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
export const newestCheckpointsOptions = (run: string) => queryOptions({
  queryKey: ["run", run, "newest checkpoints"],
  queryFn: async () => (await checkpointsOf(run, CHECKPOINTS_DRAWN)).items,
  refetchInterval,
});

export const useNewestCheckpoints = (run: string) => useQuery(newestCheckpointsOptions(run));

/** The segments of each attempt, as counted in the run's goodput. */
export const timelineOptions = (run: string) => queryOptions({
  queryKey: ["run", run, "timeline"],
  queryFn: () => get<Segment[]>(`${at(run)}/timeline`),
  refetchInterval,
});

export const useTimeline = (run: string) => useQuery(timelineOptions(run));

export const useEvents = (run: string, kind: readonly string[]) =>
  useInfiniteQuery({
    queryKey: ["run", run, "events", ...kind],
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

/** Why an attempt failed; by default, the newest that has errors. */
export const useErrors = (run: string, attempt: string | undefined) =>
  useQuery({
    queryKey: ["run", run, "errors", attempt ?? ""],
    queryFn: () => get<RunErrors>(withQuery(`${at(run)}/errors`, { attempt })),
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useLogFiles = (run: string, attempt: string | undefined) =>
  useQuery({
    queryKey: ["run", run, "logs", attempt ?? ""],
    queryFn: () => get<RunLog[]>(withQuery(`${at(run)}/log-files`, { attempt })),
    // The search stays open while another attempt's files are loaded.
    placeholderData: keepPreviousData,
    refetchInterval,
  });

type Asked = Record<string, string | number | undefined>;

export const askLog = (run: string, query: Asked) =>
  get<RunLogPart>(withQuery(`${at(run)}/log-files/part`, query));

export const searchLogs = (run: string, query: Asked) =>
  get<LogSearch>(withQuery(`${at(run)}/log-files/search`, query));

/** The address of a whole log file. */
export const logDownload = (run: string, file: string) =>
  BASE + withQuery(`${at(run)}/log-files/download`, { file });

/** The lineage with its long chains folded, except for the folds in `opened`. */
export const graphOptions = (run: string, opened: readonly string[]) => queryOptions({
  queryKey: ["run", run, "lineage", ...opened],
  queryFn: () => get<Graph>(withQuery(`${at(run)}/lineage`, { folded: true, opened })),
  refetchInterval,
});

export const useGraph = (run: string, opened: readonly string[]) =>
  useQuery({ ...graphOptions(run, opened), placeholderData: keepPreviousData });

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

export const useGoodputTotals = (where: RunWhere = {}) =>
  useQuery({
    queryKey: ["goodput", where],
    queryFn: () => get<GoodputTotals>(withQuery("/goodput", { ...where })),
    placeholderData: keepPreviousData,
    refetchInterval,
  });

/** The totals by user, partition, account or tag. */
export const useGoodputGroups = (where: RunWhere, by: GroupBy | "user") =>
  useQuery({
    queryKey: ["goodput", "groups", where, by],
    queryFn: () => get<GoodputGroup[]>(withQuery("/goodput/groups", { ...where, by })),
    placeholderData: keepPreviousData,
    refetchInterval,
  });

export const useQueue = () =>
  useQuery({
    queryKey: ["queue"],
    queryFn: () => get<WaitingRun[]>("/queue"),
    // Time passes in a queue without any event.
    refetchInterval: LIVE_MS,
  });
