// A small chart over time with a line for each GPU, drawn by uPlot in the theme's colours.
import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { bytes, timeOfDay } from "../format";
import { BYTE_INCREMENTS, STEP_INCREMENTS } from "../scales";
import { colour, keepFitting } from "./chartOptions";

type Line = (number | null)[];

interface Props {
  x: number[];
  lines: Line[];
  label: string;
  format: (value: number | null | undefined) => string;
}

const HEIGHT = 130;
const LEFT_PX = 72;
// The longest time of day, with a gap.
const TIME_PX = 76;
const LINES = ["training", "lost", "good", "note", "warn", "hung", "idle", "blocked"] as const;

/** The colour of a line, as a name of the style sheet. */
export const lineName = (index: number): string => LINES[index % LINES.length] ?? "ink";

export function trackOptions({ lines, format }: Props, element: HTMLElement): uPlot.Options {
  const axis = {
    stroke: () => colour("muted"),
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [
      { ...axis, space: TIME_PX,
        values: (_, ticks) => ticks.map((at) => timeOfDay(at * 1000)) },
      { ...axis, size: LEFT_PX,
        // The values are shown as whole numbers, so ticks between them would have wrong texts.
        incrs: format === bytes ? BYTE_INCREMENTS : STEP_INCREMENTS,
        values: (_, ticks) => ticks.map((tick) => format(tick)) },
    ],
    series: [
      {},
      ...lines.map((_, index) => ({
        stroke: () => colour(lineName(index)),
        width: 1.4,
        points: { show: false },
      })),
    ],
  };
}

export function TrackChart(props: Props) {
  const { x, lines, label, format } = props;
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const given = trackOptions({ x, lines, label, format }, element);
    const plot = new uPlot(given, [x, ...lines], element);
    return keepFitting(plot, element, HEIGHT);
  }, [x, lines, label, format]);
  const ends = lines.map((line) => format(line.findLast((value) => value !== null)));
  const summary = `${label}, now ${ends.join(", ")}`;
  return <div className="chart" ref={place} role="img" aria-label={summary} />;
}
