// How the curves are drawn. It is in the address, so that a link shows the same.
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useMemo } from "react";
import { STEP } from "./curves";
import { text } from "./runsSearch";
import type { Range } from "./scales";

/** The part of the address that says how curves are drawn. */
export interface CurveSearch {
  /** The horizontal axis, unless it counts steps. */
  x?: string | undefined;
  log?: true | undefined;
  /** The weight of the moving average, below 1. */
  smooth?: number | undefined;
  from?: number | undefined;
  to?: number | undefined;
  /** Another run that is drawn below this one. */
  over?: string | undefined;
}

const WEIGHT_MAX = 0.999;
const DIGITS = 9;

/** The address of a zoom, without the noise of pixels. */
export const zoomSearch = (range: Range | null): Pick<CurveSearch, "from" | "to"> => {
  const [from, to] = (range ?? []).map((one) => Number(one.toPrecision(DIGITS)));
  return { from, to };
};

const number = (value: unknown): number | undefined =>
  typeof value === "number" && Number.isFinite(value) ? value : undefined;

/** The valid parts of an address; anything else is left out. */
export function curveSearch(given: Record<string, unknown>): CurveSearch {
  const [from, to, weight] = [number(given.from), number(given.to), number(given.smooth)];
  const isRange = from !== undefined && to !== undefined && from < to;
  const x = text(given.x);
  return {
    x: x === STEP ? undefined : x,
    log: given.log === true || given.log === 1 ? true : undefined,
    smooth: weight !== undefined && weight > 0 && weight <= WEIGHT_MAX ? weight : undefined,
    from: isRange ? from : undefined,
    to: isRange ? to : undefined,
    over: text(given.over),
  };
}

const RUNS_MAX = 8;

/** The runs of an address, `a,b`, without repetitions. */
export const runsOf = (given: unknown): string[] =>
  [...new Set((text(given) ?? "").split(",").map((one) => one.trim()).filter(Boolean))]
    .slice(0, RUNS_MAX);

export interface CurveView {
  axis: string;
  isLog: boolean;
  weight: number;
  zoom: Range | null;
  change: (change: CurveSearch) => void;
}

export function useCurveView(): CurveView {
  const given: Record<string, unknown> = useSearch({ strict: false });
  const navigate = useNavigate();
  const { x, log, smooth, from, to } = curveSearch(given);
  const change = useCallback((next: CurveSearch) => void navigate({
    to: ".",
    search: (old: Record<string, unknown>) => ({ ...old, ...next }),
    replace: true,
    resetScroll: false,
  } as Parameters<typeof navigate>[0]), [navigate]);
  const zoom = useMemo((): Range | null =>
    (from === undefined || to === undefined ? null : [from, to]), [from, to]);
  return { axis: x ?? STEP, isLog: Boolean(log), weight: smooth ?? 0, zoom, change };
}
