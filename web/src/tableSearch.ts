// The order and the columns of a table, which are in the address.
import { useNavigate, useSearch } from "@tanstack/react-router";
import { text } from "./runsSearch";

export interface TableSearch {
  /** A column's id, after a minus sign if the largest value comes first. */
  sort?: string | undefined;
  /** The ids of the shown columns, unless they are the usual ones. */
  cols?: string | undefined;
}

export const tableSearch = (given: Record<string, unknown>): TableSearch =>
  ({ sort: text(given.sort), cols: text(given.cols) });

/** The order and columns of the table of this view, and functions that change them. */
export function useTableSearch() {
  const { sort, cols } = tableSearch(useSearch({ strict: false }));
  const navigate = useNavigate();
  const change = (next: TableSearch) => void navigate({
    to: ".", search: (old: Record<string, unknown>) => ({ ...old, ...next }), replace: true,
    resetScroll: false,
  } as Parameters<typeof navigate>[0]);
  return {
    sort,
    onSort: (next: string | undefined) => change({ sort: next }),
    columns: cols?.split(","),
    setColumns: (ids: string[] | undefined) => change({ cols: ids?.join(",") }),
  };
}
