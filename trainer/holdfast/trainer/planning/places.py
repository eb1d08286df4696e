"""Finds where each written box lies: a plan's rows as `.metadata` lists them, in windows.

This runs in the background after planning, because only `.metadata` needs the offsets of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.trainer.format.columns import Int32s, Int64s, end_to_end
from holdfast.trainer.planning.boxes import group
from holdfast.trainer.planning.global_plan import GlobalPlan, align

# Rows that are handled together. Their columns fit into a core's cache.
WINDOW_ROWS: Final = 8192


@dataclass(frozen=True)
class Window:
    """Consecutive rows by key and place, as columns.

    `nth` counts the boxes of one item. `offset` and `length` are bytes in the writer's file.
    `form` numbers the forms of all shard tables.
    """

    key: Int32s
    nth: Int64s
    place: Int64s
    form: Int32s
    writer: Int32s
    offset: Int64s
    length: Int64s


@dataclass(frozen=True)
class Places:
    """All written rows. `order` lists them by key and place; each item's begin at `first`.

    The other columns are by row, except `form_bytes`, which is by form.
    """

    order: Int64s
    first: Int64s
    key: Int32s
    place: Int64s
    form: Int32s
    writer: Int32s
    offset: Int64s
    form_bytes: Int64s

    def windows(self) -> Iterator[Window]:
        """Yield all rows in order, `WINDOW_ROWS` at a time."""
        for begin in range(0, len(self.order), WINDOW_ROWS):
            row = self.order[begin : begin + WINDOW_ROWS]
            key, form = self.key[row], self.form[row]
            yield Window(
                key=key,
                nth=np.arange(begin, begin + len(row)) - self.first[key],
                place=self.place[row],
                form=form,
                writer=self.writer[row],
                offset=self.offset[row],
                length=self.form_bytes[form],
            )


def count_rows(plan: GlobalPlan) -> Int64s:
    """Return the number of written boxes of each item."""
    counts = np.zeros(len(plan.items), dtype=np.int64)
    for key, writer in zip(plan.keys, plan.writers, strict=True):
        np.add.at(counts, key, np.count_nonzero(writer >= 0, axis=0))
    return counts


def find_places(plan: GlobalPlan) -> Places:
    """Sort the written rows and compute their offsets."""
    lines = [len(shard_table.digests) for shard_table in plan.shard_tables]
    forms = np.cumsum(
        [0, *(len(shard_table.pattern.form_bytes) for shard_table in plan.shard_tables)]
    )
    form = [
        np.tile(shard_table.pattern.form + np.int32(base), count)
        for shard_table, count, base in zip(plan.shard_tables, lines, forms.tolist(), strict=False)
    ]
    key = [np.tile(columns, count) for columns, count in zip(plan.keys, lines, strict=True)]
    keys = end_to_end(key, np.int32)
    place = end_to_end([shard_table.place.ravel() for shard_table in plan.shard_tables], np.int64)
    writer = end_to_end([writer.ravel() for writer in plan.writers], np.int32)
    written = np.flatnonzero(writer >= 0)
    counts = count_rows(plan)
    return Places(
        order=written[group(keys[written], place[written], plan.items).order],
        first=np.cumsum(counts) - counts,
        key=keys,
        place=place,
        form=end_to_end(form, np.int32),
        writer=writer,
        offset=end_to_end([offset.ravel() for offset in _offsets(plan)], np.int64),
        form_bytes=end_to_end(
            [shard_table.pattern.form_bytes for shard_table in plan.shard_tables], np.int64
        ),
    )


def stack_sizes(parts: list[Int64s]) -> Int64s:
    """Stack tables of sizes vertically. Narrow ones are padded with 1."""
    dims = max((part.shape[1] for part in parts), default=0)
    stacked = np.ones((sum(len(part) for part in parts), dims), dtype=np.int64)
    at = 0
    for part in parts:
        stacked[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return stacked


def _offsets(plan: GlobalPlan) -> list[Int64s]:
    """Return by shard table where each written row begins in its writer's file."""
    offsets = [
        np.zeros(shard_table.place.shape, dtype=np.int64) for shard_table in plan.shard_tables
    ]
    lengths = [
        shard_table.pattern.form_bytes[shard_table.pattern.form]
        for shard_table in plan.shard_tables
    ]
    for blocks, kept in zip(plan.held, plan.kept, strict=True):
        base = 0
        for number, line in blocks:
            rows = kept[plan.shard_tables[number].pattern.kind]
            its_lengths = align(lengths[number][rows])
            ends = base + np.cumsum(its_lengths)
            offsets[number][line, rows] = ends - its_lengths
            base = int(ends[-1]) if len(rows) else base
    return offsets
