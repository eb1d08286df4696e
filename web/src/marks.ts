// Where the labels of a curve's marks are drawn. Pure functions; all lengths are in pixels.

export interface Wanted {
  /** The position of the mark's line, and the width of its label. */
  x: number;
  width: number;
}

export interface Placed {
  left: number;
  row: number;
}

const GAP = 10;
const FROM_LINE = 4;

/** The place of each label between `left` and `right` in one of `rows` rows, or null if it would
    overlap another label or the edge. A label is on the right of its line if possible. */
export function placeLabels(
  wanted: Wanted[],
  { left, right, rows, scale = 1 }: { left: number; right: number; rows: number; scale?: number },
): (Placed | null)[] {
  const taken: [number, number][][] = Array.from({ length: rows }, () => []);
  const isFree = (row: number, from: number, to: number): boolean =>
    from >= left && to <= right &&
    (taken[row] ?? []).every(([start, end]) =>
      to + GAP * scale <= start || from >= end + GAP * scale);
  const place = ({ x, width }: Wanted): Placed | null => {
    for (const from of [x + FROM_LINE * scale, x - width - FROM_LINE * scale]) {
      for (let row = 0; row < rows; row += 1) {
        if (!isFree(row, from, from + width)) continue;
        taken[row]?.push([from, from + width]);
        return { left: from, row };
      }
    }
    return null;
  };
  return wanted.map(place);
}
