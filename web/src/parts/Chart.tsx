// Curves of one metric drawn by uPlot in the theme's colours, with marks for events of the run.
// All charts of a page have one cursor and one zoom.
import {
  useEffect, useEffectEvent, useMemo, useRef, useState, type KeyboardEvent,
} from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { chartOptions, dataOf, HEIGHT, keepFitting, type Drawn, type Line } from "./chartOptions";
import { figure } from "../format";
import { panned, placeWords, zoomed, type Range } from "../scales";
import type { Mark } from "../story";

interface Props {
  lines: Line[];
  label: string;
  axis: string;
  isLog: boolean;
  marks: Mark[];
  /** The part of the axis that is shown; null for all of it. */
  zoom: Range | null;
  extent: Range;
  onZoom: (zoom: Range | null) => void;
}

const WHEEL_FACTOR = 1.25;
const KEY_FACTOR = 2;
const PAN_SHARE = 0.25;
export const KEYS_HELP = "Arrow keys move the cursor, + and − zoom, Shift and an arrow key move "
  + "the part that is shown, 0 shows everything. Drag over a curve, or turn the wheel with Ctrl, "
  + "to zoom in.";

/** The values at the cursor as a sentence. */
function spoken(plot: uPlot, { lines, label, axis }: Props): string {
  const [x] = plot.data;
  const at = plot.cursor.idx;
  if (at == null) return "";
  const values = lines.map((line, index) =>
    `${lines.length > 1 ? `${line.name} ` : ""}${figure(plot.data[index + 1]?.[at] ?? null)}`);
  return `${axis} ${placeWords(axis, x[at])}: ${label} ${values.join(", ")}`;
}

/** The index of the next position with a value, beginning at the cursor. */
function nextIndex(plot: uPlot, by: 1 | -1): number | null {
  const [x] = plot.data;
  const { min, max } = plot.scales.x ?? {};
  const now = plot.cursor.idx;
  const isShown = (at: number) => (x[at] ?? NaN) >= (min ?? 0) && (x[at] ?? NaN) <= (max ?? 0);
  if (now != null) return isShown(now + by) ? now + by : now;
  const shown = x.map((_, at) => at).filter(isShown);
  return (by > 0 ? shown[0] : shown.at(-1)) ?? null;
}

/** Creates the plot in the element, and keeps its data, size and colours. */
function usePlot(props: Props, zoom: (range: Range | null) => void) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const now = useRef(props.zoom);
  const { lines, label, axis, isLog, marks, zoom: range } = props;
  const data = useMemo(() => dataOf(lines), [lines]);
  const key = JSON.stringify([label, axis, isLog, marks,
    lines.map(({ name, colour: tone, raw }) => [name, tone, Boolean(raw)])]);
  const draw = useEffectEvent((element: HTMLElement) => {
    const drawn: Drawn = { lines, label, axis, isLog, marks, zoom: () => now.current,
      onSelect: zoom };
    return new uPlot(chartOptions(drawn, element.clientWidth), data, element);
  });
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const made = draw(element);
    plot.current = made;
    const end = keepFitting(made, element, HEIGHT);
    return () => {
      end();
      plot.current = null;
    };
    // New values update the existing plot. Only other lines, marks or scales create a new one.
  }, [key]);
  useEffect(() => {
    now.current = range;
    plot.current?.setData(data);
  }, [data, range]);
  return [place, plot] as const;
}

export function Chart(props: Props) {
  const { lines, label, axis, extent, zoom, onZoom } = props;
  const [said, say] = useState("");
  const [place, plot] = usePlot(props, onZoom);
  const shown = zoom ?? extent;
  const wheel = useEffectEvent((event: WheelEvent) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const drawn = plot.current;
    if (!drawn) return;
    const centre = drawn.posToVal(event.clientX - drawn.over.getBoundingClientRect().left, "x");
    onZoom(zoomed(shown, extent, event.deltaY > 0 ? WHEEL_FACTOR : 1 / WHEEL_FACTOR, centre));
  });
  useEffect(() => {
    const element = place.current;
    const turn = (event: WheelEvent) => wheel(event);
    // React's own listener could not keep the page from scrolling.
    element?.addEventListener("wheel", turn, { passive: false });
    return () => element?.removeEventListener("wheel", turn);
  }, [place]);
  const move = (by: 1 | -1) => {
    const drawn = plot.current;
    const at = drawn && nextIndex(drawn, by);
    if (!drawn || at === null || at === undefined) return;
    drawn.setCursor({ left: drawn.valToPos(drawn.data[0][at] ?? 0, "x"), top: HEIGHT / 4 });
    say(spoken(drawn, props));
  };
  const press = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const drawn = plot.current;
    const at = drawn?.cursor.idx;
    const centre = (at != null ? drawn?.data[0][at] : undefined) ?? (shown[0] + shown[1]) / 2;
    const arrow = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (arrow !== 0 && event.shiftKey) onZoom(panned(shown, extent, arrow * PAN_SHARE));
    else if (arrow !== 0) move(arrow);
    else if (event.key === "+" || event.key === "=") {
      onZoom(zoomed(shown, extent, 1 / KEY_FACTOR, centre));
    } else if (event.key === "-") onZoom(zoomed(shown, extent, KEY_FACTOR, centre));
    else if (event.key === "0" || event.key === "Escape") onZoom(null);
    else return;
    event.preventDefault();
  };
  const last = lines[0]?.y.at(-1);
  const summary = lines.length > 1 ? `${label} of ${lines.map((one) => one.name).join(", ")}`
    : `${label}: ${lines[0]?.y.length ?? 0} points, now ${
      last === null ? "not a finite number" : figure(last)}`;
  return (
    <div className={lines.length > 1 ? "chart several" : "chart"}>
      <div ref={place} tabIndex={0} role="group" aria-label={summary} aria-description={KEYS_HELP}
        aria-roledescription={`chart by ${axis}`} onKeyDown={press}
        onDoubleClick={() => onZoom(null)}
        onBlur={() => plot.current?.setCursor({ left: -10, top: -10 })} />
      <span className="visually-hidden" role="status">{said}</span>
    </div>
  );
}
