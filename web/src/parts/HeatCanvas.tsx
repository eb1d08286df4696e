// The canvas of a heat map. It draws only what is visible, and the cursor is two lines over it.
import {
  useCallback, useEffect, useLayoutEffect, useRef, useState, type KeyboardEvent, type MouseEvent,
} from "react";
import { moved, paint, paletteOf, type Cells, type Cursor, type Scale } from "../heat";

const COLOURS = [0, 1, 2, 3, 4];
const HEIGHT_MAX = 480;
const HEIGHT_MIN = 96;
const ROW_MAX_PX = 24;
const BORDERS_PX = 2;

/** The theme's colours of a heat map, from low to high. */
function colours(element: HTMLElement): (readonly [number, number, number])[] {
  const probe = document.createElement("span");
  element.append(probe);
  const found = COLOURS.map((number) => {
    probe.style.color = `var(--heat-${number})`;
    const channels = getComputedStyle(probe).color.matchAll(/[\d.]+/g);
    const [r = 0, g = 0, b = 0] = Array.from(channels, ([text]) => Number(text));
    return [r, g, b] as const;
  });
  probe.remove();
  return found;
}

/** Redraws when the theme changes. */
function useThemeCount(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const change = () => setCount((before) => before + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", change);
    window.addEventListener("holdfast:theme", change);
    return () => {
      dark.removeEventListener("change", change);
      window.removeEventListener("holdfast:theme", change);
    };
  }, []);
  return count;
}

interface Props {
  cells: Cells;
  scale: Scale;
  /** How many times the ranks are taller than in one view. */
  zoom: number;
  cursor: Cursor | null;
  onCursor: (cursor: Cursor) => void;
  /** The buckets in which a launch began. */
  began: { launch: number; bucket: number }[];
  label: string;
}

export function HeatCanvas({ cells, scale, zoom, cursor, onCursor, began, label }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const frame = useRef(0);
  const image = useRef<ImageData | null>(null);
  const palette = useRef<Uint32Array>(new Uint32Array(256));
  const theme = useThemeCount();
  const height = Math.min(HEIGHT_MAX, Math.max(HEIGHT_MIN, cells.ranks * ROW_MAX_PX));
  const full = height * zoom;

  const draw = useCallback(() => {
    const [element, area] = [canvas.current, place.current];
    const context = element?.getContext("2d");
    if (!element || !area || !context) return;
    if (image.current?.width !== cells.buckets || image.current.height !== height) {
      image.current = context.createImageData(cells.buckets, height);
    }
    const pixels = new Uint32Array(image.current.data.buffer);
    const from = (area.scrollTop / full) * cells.ranks;
    const to = from + cells.ranks / zoom;
    paint(pixels, height, cells, { from, to }, palette.current);
    context.putImageData(image.current, 0, 0);
  }, [cells, height, full, zoom]);

  useLayoutEffect(() => {
    if (place.current) palette.current = paletteOf(colours(place.current), scale);
    draw();
  }, [draw, scale, theme]);

  const scrolled = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(draw);
  };
  useEffect(() => () => cancelAnimationFrame(frame.current), []);

  const point = (event: MouseEvent) => {
    const box = event.currentTarget.getBoundingClientRect();
    const bucket = Math.floor(((event.clientX - box.left) / box.width) * cells.buckets);
    const row = Math.floor(((event.clientY - box.top) / full) * cells.ranks);
    if (row < 0 || row >= cells.ranks || bucket < 0 || bucket >= cells.buckets) return;
    if (row !== cursor?.row || bucket !== cursor.bucket) onCursor({ row, bucket });
  };
  const press = (event: KeyboardEvent) => {
    const next = moved(cursor, event.key, cells);
    if (!next) return;
    event.preventDefault();
    onCursor(next);
    const [area, top] = [place.current, ((next.row + 0.5) / cells.ranks) * full];
    if (area && (top < area.scrollTop || top > area.scrollTop + height)) {
      area.scrollTop = top - height / 2;
    }
  };
  return (
    <div
      ref={place} className="heat" tabIndex={0} role="application" aria-label={label}
      style={{ height: height + BORDERS_PX }} onScroll={scrolled} onKeyDown={press}
    >
      <div style={{ height: full }} onMouseMove={point}>
        <div className="seen" style={{ height }}>
          <canvas ref={canvas} width={cells.buckets} height={height} />
          {began.map(({ launch, bucket }) => (
            <span key={launch} className="began" style={{
              left: `${(bucket / cells.buckets) * 100}%` }} />
          ))}
          {cursor ? (
            <span className="cross down" style={{
              transform: `translateX(${((cursor.bucket + 0.5) / cells.buckets) * 100}%)` }} />
          ) : null}
        </div>
        {cursor ? (
          <span className="cross across" style={{
            transform: `translateY(${((cursor.row + 0.5) / cells.ranks) * full}px)` }} />
        ) : null}
      </div>
    </div>
  );
}
