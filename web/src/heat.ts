// The cells of a heat map, its colours and its cursor. Pure functions.
import type { HeatHost, HeatMap } from "./api/schema";

/** The levels of a heat map, by rank and bucket; 0 means no value. */
export interface Cells {
  levels: Uint8Array;
  ranks: number;
  buckets: number;
}

export interface Cursor {
  /** Counted from the first rank of the map. */
  row: number;
  bucket: number;
}

/** Levels below `low` and above `high` have the colours of these. */
export interface Scale {
  low: number;
  high: number;
}

type Colour = readonly [number, number, number];

// Fewer steps between the ends would show noise as if it mattered.
const STEPS_MIN = 3;
const LOW_SHARE = 0.01;
const HIGH_SHARE = 0.995;
const OPAQUE = 255;
const BLACK: Colour = [0, 0, 0];

export function cellsOf({ rows, alphabet, buckets }: HeatMap): Cells {
  const levelOf = new Uint8Array(128);
  for (let level = 0; level < alphabet.length; level += 1) {
    levelOf[alphabet.charCodeAt(level)] = level;
  }
  const levels = new Uint8Array(rows.length * buckets);
  rows.forEach((row, rank) => {
    const start = rank * buckets;
    for (let bucket = 0; bucket < buckets; bucket += 1) {
      levels[start + bucket] = levelOf[row.charCodeAt(bucket)] ?? 0;
    }
  });
  return { levels, ranks: rows.length, buckets };
}

/** The value that a level stands for; null for no value. */
export const valueOf = ({ lowest_s, ratio }: HeatMap, level: number): number | null =>
  level === 0 ? null : lowest_s * ratio ** (level - 1);

export const levelAt = ({ levels, buckets }: Cells, { row, bucket }: Cursor): number =>
  levels[row * buckets + bucket] ?? 0;

/** The levels at the ends of the colours. A single outlier must not make all others equal. */
export function scaleOf({ levels }: Cells): Scale {
  const counts = new Array<number>(256).fill(0);
  let total = 0;
  for (const level of levels) {
    if (level === 0) continue;
    counts[level] = (counts[level] ?? 0) + 1;
    total += 1;
  }
  const quantile = (share: number) => {
    let seen = 0;
    return Math.max(1, counts.findIndex((count) => (seen += count) >= share * total && seen > 0));
  };
  const low = quantile(LOW_SHARE);
  return { low, high: Math.max(quantile(HIGH_SHARE), low + STEPS_MIN) };
}

/** The colours of all levels as words of an `ImageData`, from colours at equal distances. */
export function paletteOf(colours: readonly Colour[], { low, high }: Scale): Uint32Array {
  const palette = new Uint32Array(256);
  const bytes = new Uint8ClampedArray(palette.buffer);
  for (let level = 1; level < 256; level += 1) {
    const share = Math.min(1, Math.max(0, (level - low) / (high - low)));
    const place = share * (colours.length - 1);
    const first = colours[Math.floor(place)] ?? BLACK;
    const second = colours[Math.ceil(place)] ?? first;
    const part = place - Math.floor(place);
    for (const channel of [0, 1, 2] as const) {
      bytes[4 * level + channel] = first[channel] + part * (second[channel] - first[channel]);
    }
    bytes[4 * level + 3] = OPAQUE;
  }
  return palette;
}

/** Fills an image of `height` rows with ranks `from` up to `to`. Where several ranks share a row,
    it shows the largest value, so that no slow rank vanishes. */
export function paint(
  image: Uint32Array, height: number, { levels, buckets, ranks }: Cells,
  { from, to }: { from: number; to: number }, palette: Uint32Array,
) {
  const row = new Uint8Array(buckets);
  let [drawnFirst, drawnLast] = [-1, -1];
  for (let y = 0; y < height; y += 1) {
    const first = Math.floor(from + ((to - from) * y) / height);
    const next = Math.floor(from + ((to - from) * (y + 1)) / height);
    const last = Math.min(ranks, Math.max(first + 1, next));
    const start = y * buckets;
    // Where a rank has several rows, all but the first are copies.
    if (first === drawnFirst && last === drawnLast) {
      image.copyWithin(start, start - buckets, start);
      continue;
    }
    [drawnFirst, drawnLast] = [first, last];
    row.fill(0);
    for (let rank = first; rank < last; rank += 1) {
      const at = rank * buckets;
      for (let bucket = 0; bucket < buckets; bucket += 1) {
        const level = levels[at + bucket] as number;
        if (level > (row[bucket] as number)) row[bucket] = level;
      }
    }
    for (let bucket = 0; bucket < buckets; bucket += 1) {
      image[start + bucket] = palette[row[bucket] as number] as number;
    }
  }
}

/** The node that has a rank. */
export const hostOf = (hosts: HeatHost[], rank: number): HeatHost | undefined =>
  hosts.findLast((one) => one.first_rank <= rank && rank < one.first_rank + one.ranks);

const MOVES: Record<string, readonly [number, number]> = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
  PageUp: [-16, 0], PageDown: [16, 0],
};

/** The cursor after a key; null if the key does not move it. */
export function moved(
  cursor: Cursor | null, key: string, { ranks, buckets }: Cells,
): Cursor | null {
  const here = cursor ?? { row: 0, bucket: buckets - 1 };
  if (key === "Home") return { ...here, bucket: 0 };
  if (key === "End") return { ...here, bucket: buckets - 1 };
  const move = MOVES[key];
  if (!move) return null;
  if (!cursor) return here;
  return {
    row: Math.min(ranks - 1, Math.max(0, here.row + move[0])),
    bucket: Math.min(buckets - 1, Math.max(0, here.bucket + move[1])),
  };
}
