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
import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { useListKeys } from "../keyboard";
import { Guard } from "./guard";

declare module "@tanstack/react-table" {
  interface ColumnMeta<TData extends RowData, TValue> {
    /** Align numbers on the right. */
    number?: boolean;
    /** Hidden in a narrow window. */
    wide?: boolean;
    /** Hidden in a window of medium width. The row says it elsewhere. */
    broad?: boolean;
    /** Shown in a roomy window only. */
    roomy?: boolean;
    /** A sentence: not squeezed to a word a line by the other columns. */
    prose?: boolean;
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
  /** For tables whose order is in the address. */
  onSort?: (sort: string | undefined) => void;
  /** The column by which the server sorts, after a minus sign if its order is descending. */
  sort?: string | undefined;
  /** True if the loaded rows are sorted here although the order is in the address. */
  isLocal?: boolean;
  /** False while some rows are not loaded. */
  isWhole?: boolean;
  rowClass?: (row: T) => string | undefined;
}

type Meta = {
  number?: boolean; wide?: boolean; broad?: boolean; roomy?: boolean; prose?: boolean;
};

const classOf = (meta?: Meta) =>
  [meta?.number && "number", meta?.wide && "wide-only", meta?.broad && "broad-only",
    meta?.roomy && "roomy-only", meta?.prose && "prose"]
    .filter(Boolean).join(" ") || undefined;

const sortingOf = (sort: string | undefined): SortingState =>
  sort ? [{ id: sort.replace(/^-/, ""), desc: sort.startsWith("-") }] : [];

const ARIA = { asc: "ascending", desc: "descending" } as const;

export function Table<T>({
  label, rows, columns, keyOf, open, onSort, sort, isLocal = !onSort, isWhole = true, rowClass,
}: Props<T>) {
  const [own, setOwn] = useState<SortingState>([]);
  const given = useMemo(() => sortingOf(sort), [sort]);
  const sorting = onSort ? given : own;
  const [selected, setSelected] = useState(-1);
  const body = useRef<HTMLTableSectionElement>(null);
  const table = useReactTable({
    data: rows,
    columns,
    state: { sorting },
    manualSorting: !isLocal,
    enableSorting: !isLocal || isWhole,
    onSortingChange: (change) => {
      const next = typeof change === "function" ? change(sorting) : change;
      const [by] = next;
      if (onSort) onSort(by && `${by.desc ? "-" : ""}${by.id}`);
      else setOwn(next);
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
                  <Guard instead={<span className="muted">unreadable</span>}>
                    {flexRender(cell.column.columnDef.cell, cell.getContext())}
                  </Guard>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
