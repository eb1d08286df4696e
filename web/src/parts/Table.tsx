// The table of all pages: sorting by click, rows that open, keyboard navigation, narrow windows.
import {
  flexRender,
  getCoreRowModel,
  getSortedRowModel,
  useReactTable,
  type ColumnDef,
  type RowData,
  type SortingState,
} from "@tanstack/react-table";
import { useCallback, useEffect, useRef, useState } from "react";
import { useListKeys } from "../keyboard";

declare module "@tanstack/react-table" {
  interface ColumnMeta<TData extends RowData, TValue> {
    /** Align numbers on the right. */
    number?: boolean;
    /** Hidden in a narrow window. */
    wide?: boolean;
    /** Unused: the declaration must use both type parameters of the library. */
    unused?: [TData, TValue];
  }
}

interface Props<T> {
  label: string;
  rows: T[];
  columns: ColumnDef<T, unknown>[];
  keyOf: (row: T) => string;
  open?: (row: T) => void;
  /** For tables that the server sorts. Otherwise the loaded rows are sorted. */
  onSort?: (column: string | null, descending: boolean) => void;
  /** False while some rows are not loaded. */
  isWhole?: boolean;
  rowClass?: (row: T) => string | undefined;
}

const classOf = (meta?: { number?: boolean; wide?: boolean }) =>
  [meta?.number && "number", meta?.wide && "wide-only"].filter(Boolean).join(" ") || undefined;

const ARIA = { asc: "ascending", desc: "descending" } as const;

export function Table<T>({
  label, rows, columns, keyOf, open, onSort, isWhole = true, rowClass,
}: Props<T>) {
  const [sorting, setSorting] = useState<SortingState>([]);
  const [selected, setSelected] = useState(-1);
  const body = useRef<HTMLTableSectionElement>(null);
  const table = useReactTable({
    data: rows,
    columns,
    state: { sorting },
    manualSorting: Boolean(onSort),
    enableSorting: Boolean(onSort) || isWhole,
    onSortingChange: (change) => {
      const next = typeof change === "function" ? change(sorting) : change;
      setSorting(next);
      onSort?.(next[0]?.id ?? null, next[0]?.desc ?? false);
    },
    getRowId: keyOf,
    getCoreRowModel: getCoreRowModel(),
    getSortedRowModel: getSortedRowModel(),
  });
  const shown = table.getRowModel().rows;
  const openAt = useCallback(
    (index: number) => {
      const row = shown[index];
      if (row && open) open(row.original);
    },
    [shown, open],
  );
  useListKeys(open ? shown.length : 0, selected, setSelected, openAt);
  useEffect(() => {
    body.current?.children[selected]?.scrollIntoView({ block: "nearest" });
  }, [selected]);
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          {table.getHeaderGroups().map((group) => (
            <tr key={group.id}>
              {group.headers.map(({ id, column, getContext }) => {
                const sorted = column.getIsSorted();
                const text = flexRender(column.columnDef.header, getContext());
                return (
                  <th
                    key={id}
                    scope="col"
                    className={classOf(column.columnDef.meta)}
                    aria-sort={sorted ? ARIA[sorted] : undefined}
                  >
                    {column.getCanSort() ? (
                      <button type="button" onClick={column.getToggleSortingHandler()}>
                        {text}
                        {sorted ? (sorted === "asc" ? " ▲" : " ▼") : ""}
                      </button>
                    ) : (
                      text
                    )}
                  </th>
                );
              })}
            </tr>
          ))}
        </thead>
        <tbody ref={body}>
          {shown.map((row, index) => (
            <tr
              key={row.id}
              className={rowClass?.(row.original)}
              data-selected={index === selected || undefined}
            >
              {row.getVisibleCells().map((cell) => (
                <td key={cell.id} className={classOf(cell.column.columnDef.meta)}>
                  {flexRender(cell.column.columnDef.cell, cell.getContext())}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
