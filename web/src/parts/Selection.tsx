// The rows of the list of runs that are selected, and the checkboxes that select them.
import type { ColumnDef } from "@tanstack/react-table";
import { createContext, useCallback, useContext, useMemo, useState, type ReactNode } from "react";
import type { RunRow } from "../api/types";

/** So many runs can be selected at a time: each is asked for its price and gets its own order. */
export const SELECTED_MAX = 50;

interface Selection {
  selected: ReadonlyMap<string, string>;
  toggle: (rows: RunRow[], on: boolean) => void;
  clear: () => void;
}

const None: Selection = { selected: new Map(), toggle: () => {}, clear: () => {} };
const Context = createContext(None);

/** The selected runs: their names by uid. */
export const useSelection = (): Selection => useContext(Context);

export function SelectionProvider({ children }: { children: ReactNode }) {
  const [selected, setSelected] = useState<ReadonlyMap<string, string>>(new Map());
  const toggle = useCallback((rows: RunRow[], on: boolean) => {
    setSelected((old) => {
      const next = new Map(old);
      for (const { uid, run } of rows) {
        if (!on) next.delete(uid);
        else if (next.size < SELECTED_MAX) next.set(uid, run);
      }
      return next;
    });
  }, []);
  const clear = useCallback(() => setSelected(new Map()), []);
  const value = useMemo(() => ({ selected, toggle, clear }), [selected, toggle, clear]);
  return <Context.Provider value={value}>{children}</Context.Provider>;
}

function Check({ rows, label }: { rows: RunRow[]; label: string }) {
  const { selected, toggle } = useSelection();
  return (
    <input
      type="checkbox"
      aria-label={label}
      checked={rows.length > 0 && rows.every((one) => selected.has(one.uid))}
      onChange={(event) => toggle(rows, event.target.checked)}
    />
  );
}

export const SELECT: ColumnDef<RunRow, unknown> = {
  id: "select",
  // A phone has no room for the boxes: there, a run is opened for its actions.
  meta: { wide: true },
  enableSorting: false,
  header: ({ table }) => (
    <Check rows={table.getRowModel().rows.map((row) => row.original)}
      label="Select all runs shown" />
  ),
  cell: ({ row: { original } }) => <Check rows={[original]} label={`Select ${original.run}`} />,
};
