// The queries of ranks and GPUs over time. They are large, so no heartbeat reloads them.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { get, withQuery } from "./client";
import type { GpuSeries, HeatMap, HeatValue } from "./schema";

const LIVE_MS = 30_000;

/** What a view of an attempt over time shows. */
export interface Shown {
  attempt?: number | undefined;
  time_from?: number | undefined;
  time_to?: number | undefined;
}

const at = (run: string) => `/runs/${encodeURIComponent(run)}`;

export const useHeatMap = (run: string, where: Shown & { value: HeatValue }, live: boolean) =>
  useQuery({
    queryKey: ["series", run, "heat-map", where],
    queryFn: () => get<HeatMap>(withQuery(`${at(run)}/heat-map`, { ...where })),
    placeholderData: keepPreviousData,
    refetchInterval: live ? LIVE_MS : false,
    staleTime: LIVE_MS,
  });

export const useGpus = (run: string, where: Shown & { node?: number | undefined }, live: boolean) =>
  useQuery({
    queryKey: ["series", run, "gpus", where],
    queryFn: () => get<GpuSeries>(withQuery(`${at(run)}/gpus`, { ...where, buckets: 300 })),
    placeholderData: keepPreviousData,
    refetchInterval: live ? LIVE_MS : false,
    staleTime: LIVE_MS,
  });
