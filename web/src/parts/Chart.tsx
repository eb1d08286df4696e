// A curve drawn by uPlot in the theme's colours, with marks for events of the run.
import { useEffect, useEffectEvent, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { STEP_INCREMENTS } from "../curves";
import { count, figure } from "../format";
import type { Mark } from "../story";

interface Props {
  x: number[];
  y: (number | null)[];
  label: string;
  xLabel: string;
  marks: Mark[];
}

const HEIGHT = 200;
const MARK_GAP_PX = 14;
const MARK_ROW_PX = 13;

const probe = document.createElement("span");
probe.hidden = true;

/** A colour of the style sheet in the current theme, for the canvas. */
function colour(name: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** Draws vertical lines with labels. A label that would overlap moves to a second row, or is
    omitted. */
function drawMarks(marks: Mark[]) {
  return (plot: uPlot) => {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio || 1;
    const free = [Number.NEGATIVE_INFINITY, Number.NEGATIVE_INFINITY];
    ctx.save();
    ctx.textAlign = "left";
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(mark.x, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(mark.tone);
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const width = ctx.measureText(mark.word).width;
      // A label at the right edge is on the left of its line.
      const left = x + width + 8 * ratio > bbox.left + bbox.width ? x - width - 4 * ratio
        : x + 4 * ratio;
      const row = free.findIndex((end) => left >= end);
      if (row < 0) continue;
      ctx.fillStyle = colour("ink");
      ctx.fillText(mark.word, left, bbox.top - (5 + row * MARK_ROW_PX) * ratio);
      free[row] = left + width + MARK_GAP_PX * ratio;
    }
    ctx.restore();
  };
}

const axis = (label: string): uPlot.Axis => ({
  label,
  stroke: () => colour("muted"),
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { stroke: () => colour("line"), width: 1 },
  font: "12px system-ui, sans-serif",
  labelFont: "12px system-ui, sans-serif",
  labelSize: 14,
  size: 28,
});

// Half of the last tick's label is to the right of the plot.
const PADDING_RIGHT = 32;

function options({ label, xLabel, marks }: Props, width: number): uPlot.Options {
  return {
    width,
    height: HEIGHT,
    padding: [32, PADDING_RIGHT, 0, 4],
    scales: { x: { time: false } },
    cursor: { points: { size: 7 } },
    axes: [
      {
        ...axis(xLabel),
        incrs: STEP_INCREMENTS,
        values: (_, ticks) => ticks.map((tick) => count(tick)),
      },
      { ...axis(""), size: 62, values: (_, ticks) => ticks.map((tick) => figure(tick)) },
    ],
    series: [
      { label: xLabel, value: (_, value) => count(value) },
      {
        label,
        stroke: () => colour("training"),
        width: 1.6,
        spanGaps: false,
        points: { show: false },
        value: (_, value) => figure(value),
      },
    ],
    hooks: { draw: [drawMarks(marks)] },
  };
}

export function Chart(props: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { x, y, label, marks } = props;
  const marksKey = JSON.stringify(marks);
  const draw = useEffectEvent((element: HTMLElement) =>
    new uPlot(options(props, element.clientWidth), [x, y], element));
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const made = draw(element);
    plot.current = made;
    const redraw = () => made.redraw(false, true);
    const observer = new ResizeObserver(() =>
      made.setSize({ width: element.clientWidth, height: HEIGHT }),
    );
    observer.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    window.addEventListener("holdfast:theme", redraw);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", redraw);
      window.removeEventListener("holdfast:theme", redraw);
      made.destroy();
      plot.current = null;
    };
    // New values update the existing plot. Only new marks or labels create a new one.
  }, [label, marksKey]);
  useEffect(() => plot.current?.setData([x, y]), [x, y]);
  const last = y.findLast((value) => value !== null);
  const summary = `${label}: ${y.length} points, now ${figure(last)}`;
  return <div className="chart" ref={place} role="img" aria-label={summary} />;
}
