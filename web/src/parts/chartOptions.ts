// The options of a chart for uPlot: its lines, axes, marks and cursor.
import uPlot from "uplot";
import { aroundConstant } from "../curves";
import { figure } from "../format";
import { placeLabels } from "../marks";
import {
  axisWords, isFlat, isTime, logRange, logTicks, placeWords, STEP_INCREMENTS, TIME_INCREMENTS,
  type Range,
} from "../scales";
import type { Mark } from "../story";

export interface Line {
  name: string;
  /** The number of the line's colour in the style sheet. */
  colour: number;
  x: number[];
  y: (number | null)[];
  /** The values before smoothing, which are drawn pale. */
  raw?: (number | null)[] | undefined;
}

export interface Drawn {
  lines: Line[];
  label: string;
  axis: string;
  isLog: boolean;
  marks: Mark[];
  zoom: () => Range | null;
  onSelect: (range: Range) => void;
}

export const HEIGHT = 200;
const MARK_ROW_PX = 13;
const MARK_ROWS = 2;
const SELECT_MIN_PX = 8;
// Half of the last tick's label is to the right of the plot.
const PADDING_RIGHT = 32;
const RAW_ALPHA = 0.3;
// Lines differ by their dashes, too.
const DASHES = [undefined, [7, 3], [2, 3], [9, 3, 2, 3]];
const GROUP = "curves";

const probe = document.createElement("span");
probe.hidden = true;

/** A colour of the style sheet in the current theme, for the canvas. */
export function colour(name: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** Keep a plot as wide as its element and in the colours of the theme. The answer ends all. */
export function keepFitting(plot: uPlot, element: HTMLElement, height: number): () => void {
  const redraw = () => plot.redraw(false, true);
  const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
  observer.observe(element);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", redraw);
  window.addEventListener("holdfast:theme", redraw);
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", redraw);
    window.removeEventListener("holdfast:theme", redraw);
    plot.destroy();
  };
}

type Table = uPlot.AlignedData;

/** The columns of all lines on one axis: the smoothed values first, then those before smoothing. */
export function dataOf(lines: Line[]): Table {
  const raw = lines.filter((line) => line.raw);
  const tables = [...lines.map(({ x, y }) => [x, y]), ...raw.map((one) => [one.x, one.raw])];
  const [only] = lines;
  if (lines.length === 1 && only) return [only.x, only.y, ...raw.map((one) => one.raw)] as Table;
  return uPlot.join(tables as uPlot.AlignedData[]);
}

/** Draws vertical lines with labels. A label that has no room in either row is omitted; the list
    below the curves has all marks. */
function drawMarks(marks: Mark[]) {
  return (plot: uPlot) => {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio || 1;
    const [from, to] = [bbox.left, bbox.left + bbox.width];
    ctx.save();
    ctx.textAlign = "left";
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    const drawn = marks
      .map((mark) => ({ ...mark, x: Math.round(plot.valToPos(mark.x, "x", true)),
        width: ctx.measureText(mark.word).width }))
      .filter(({ x }) => x >= from && x <= to);
    // The axis of y has room for a label on the left of the first lines.
    const places = placeLabels(drawn, { left: 0, right: to, rows: MARK_ROWS, scale: ratio });
    for (const [index, { x, word, tone }] of drawn.entries()) {
      ctx.strokeStyle = colour(tone);
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const place = places[index];
      if (!place) continue;
      ctx.fillStyle = colour("ink");
      ctx.fillText(word, place.left, bbox.top - (5 + place.row * MARK_ROW_PX) * ratio);
    }
    ctx.restore();
  };
}

const axisOf = (label: string): uPlot.Axis => ({
  label,
  stroke: () => colour("muted"),
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { stroke: () => colour("line"), width: 1 },
  font: "12px system-ui, sans-serif",
  labelFont: "12px system-ui, sans-serif",
  labelSize: 14,
  size: 28,
});

function seriesOf({ lines, axis, label }: Drawn): uPlot.Series[] {
  const value = (_: uPlot, one: number | null) => figure(one);
  const base = { spanGaps: false, points: { show: false }, value };
  const stroke = ({ colour: tone }: Line) => () => colour(`curve-${tone + 1}`);
  return [
    { label: axisWords(axis), value: (_, one) => placeWords(axis, one) },
    ...lines.map((line): uPlot.Series => ({
      ...base,
      label: lines.length > 1 ? line.name : label,
      stroke: stroke(line),
      width: 1.6,
      ...(DASHES[line.colour % DASHES.length] ? { dash: DASHES[line.colour % DASHES.length] } : {}),
    })),
    ...lines.filter((line) => line.raw).map((line): uPlot.Series => ({
      ...base, label: `${line.name}, not smoothed`, class: "raw", stroke: stroke(line),
      width: 1, alpha: RAW_ALPHA,
    })),
  ];
}

/** The index of a line's value nearest to the cursor; null outside of the line. */
function nearest(plot: uPlot, series: number, at: number): number | null {
  const values = plot.data[series] as (number | null | undefined)[] | undefined;
  if (series === 0 || !values || values[at] !== undefined) return at;
  let [left, right] = [at - 1, at + 1];
  while (left >= 0 && values[left] === undefined) left -= 1;
  while (right < values.length && values[right] === undefined) right += 1;
  if (left < 0 || right >= values.length) return null;
  return at - left <= right - at ? left : right;
}

/** One cursor for all charts: a chart shows its values wherever the pointer is. */
const cursorOf = (): uPlot.Cursor => ({
  points: { size: 7 },
  drag: { x: true, y: false, setScale: false },
  // Only the place of the pointer is shared: a selection zooms all charts by the address.
  sync: { key: GROUP, scales: ["x", null], setSeries: false,
    filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
  dataIdx: nearest,
  bind: { dblclick: () => null },
});

export function chartOptions(drawn: Drawn, width: number): uPlot.Options {
  const { axis, isLog, marks, zoom, onSelect } = drawn;
  const linear = (low: number | null, high: number | null): Range => {
    if (low === null || high === null) return [0, 1];
    return isFlat(low, high) ? aroundConstant(low) : uPlot.rangeNum(low, high, 0.1, true) as Range;
  };
  return {
    width,
    height: HEIGHT,
    padding: [32, PADDING_RIGHT, 0, 4],
    scales: {
      x: { time: false, range: (_, low, high) => zoom() ?? [low ?? 0, high ?? 1] },
      y: { distr: isLog ? 3 : 1, log: 10,
        range: (_, low, high) => (isLog ? logRange(low, high) : linear(low, high)) },
    },
    cursor: cursorOf(),
    axes: [
      {
        ...axisOf(axisWords(axis)),
        incrs: isTime(axis) ? TIME_INCREMENTS : STEP_INCREMENTS,
        values: (_, ticks) => ticks.map((tick) => placeWords(axis, tick)),
        ...(isTime(axis) ? { space: 80 } : {}),
      },
      { ...axisOf(""), size: 62, values: (_, ticks) => ticks.map((tick) => figure(tick)),
        ...(isLog ? { splits: (_: uPlot, __: number, low: number, high: number) =>
          logTicks(low, high), filter: (_: uPlot, ticks: number[]) => ticks } : {}) },
    ],
    series: seriesOf(drawn),
    hooks: {
      draw: [drawMarks(marks)],
      setCursor: [(plot) => {
        plot.root.toggleAttribute("data-cursor", (plot.cursor.left ?? -1) >= 0);
      }],
      setSelect: [(plot) => {
        const { left, width: wide } = plot.select;
        if (wide < SELECT_MIN_PX) return;
        const range: Range = [plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")];
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        onSelect(range);
      }],
    },
  };
}
