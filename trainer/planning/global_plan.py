"""Who writes what, for all ranks at once: rank 0's part of planning.

Of equal boxes exactly one is written. Most boxes have one holder, who writes them; the others are
given to whoever of their holders has the least to write, but for those whose copies may differ,
which the lowest rank writes. Everything is comparing and adding up of
columns; Python loops run over keys, ranks and sets of holders, never over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.contracts.errors import SaveError
from holdfast.trainer.planning.boxes import (
    Bools,
    Groups,
    Loose,
    find_distinct,
    group,
    pick_loose,
)
from holdfast.trainer.planning.columns import (
    FIRST,
    KINDS,
    Int32s,
    Int64s,
    Item,
    Sheet,
    UInt64s,
    decode_table,
    whole_masses,
)
from holdfast.trainer.planning.writers import Holders, choose_writers

ALIGNMENT: Final = 64
_KEYS_SHOWN: Final = 5

Kept = tuple[Int32s, ...]
"""Rows that a rank writes, in the order of its file: of its block of each of the KINDS."""


@dataclass(frozen=True)
class GlobalPlan:
    """Who writes which row; a row is a column of a line of a sheet.

    `keys` says for each sheet which of the `items` each column is of, `writers`, shape (blocks,
    rows) for each sheet, which rank writes a row, `NOBODY` for none. `held` says where each rank's
    blocks are: (sheet, line), and `kept` what it writes of them, by kind.
    """

    items: tuple[Item, ...]
    sheets: tuple[Sheet, ...]
    keys: tuple[Int32s, ...]
    writers: tuple[Int32s, ...]
    held: tuple[tuple[tuple[int, int], ...], ...]
    kept: tuple[Kept, ...]
    file_bytes: Int64s


def plan_all(
    sheets: Sequence[Sheet], tables: Mapping[bytes, bytes], holdings: Sequence[Sequence[bytes]]
) -> GlobalPlan:
    """Plan for all ranks; `holdings` has the digests of each rank's blocks, by rank.

    Raises `SaveError` when ranks differ about a key, or their parts do not tile a tensor.
    """
    items, keys = _number_keys(sheets, tables)
    weights = [align(sheet.pattern.form_bytes)[sheet.pattern.form] for sheet in sheets]
    holders = Holders.of([digest for sheet in sheets for digest in sheet.digests], holdings)
    distinct = find_distinct(sheets, keys, items)
    is_loose = _find_loose(sheets, keys, distinct, holders)
    loose = pick_loose(sheets, keys, weights, is_loose)
    groups = group(loose.key, loose.place, items)
    _check_tiling(sheets, keys, items, distinct, loose, groups)
    loads = np.zeros(len(holdings), dtype=np.int64)
    writers = _holders_write(sheets, weights, distinct, keys, holders, loads)
    by_first = np.zeros(len(items), dtype=bool)
    for sheet, key in zip(sheets, keys, strict=True):
        by_first[key] |= sheet.pattern.kind == FIRST
    chosen, begin = choose_writers(loose, groups, holders, loads, by_first), 0
    for writer, rows in zip(writers, loose.at, strict=True):
        writer.ravel()[rows] = chosen[begin : begin + len(rows)]
        begin += len(rows)
    held = _locate(sheets, holdings)
    kept, file_bytes = _keep(sheets, weights, writers, held)
    return GlobalPlan(items, tuple(sheets), tuple(keys), tuple(writers), held, kept, file_bytes)


def align(lengths: Int64s) -> Int64s:
    """Lengths rounded up to the boundary on which entries begin."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def offsets_of(lengths: Int64s) -> Int64s:
    """Where entries of these lengths begin in a file, each on a boundary."""
    aligned = align(lengths)
    return np.cumsum(aligned) - aligned


def _number_keys(
    sheets: Sequence[Sheet], tables: Mapping[bytes, bytes]
) -> tuple[tuple[Item, ...], list[Int32s]]:
    """One list of items for all tables, and for each sheet its columns' places in it."""
    items: dict[str, Item] = {}
    number: dict[str, int] = {}
    numbers: dict[bytes, Int32s] = {}
    for digest in dict.fromkeys(sheet.pattern.table for sheet in sheets):
        found = []
        for item in decode_table(tables[digest]):
            known = items.setdefault(item.key, item)
            if known != item:
                raise SaveError(
                    f"{item.key}: one rank has {_describe(known)}, another {_describe(item)}; "
                    "every rank must save the same tensor under one name"
                )
            found.append(number.setdefault(item.key, len(number)))
        numbers[digest] = np.array(found, dtype=np.int32)
    keys = [numbers[sheet.pattern.table][sheet.pattern.item] for sheet in sheets]
    return tuple(items.values()), keys


def _find_loose(
    sheets: Sequence[Sheet], keys: Sequence[Int32s], distinct: Bools, holders: Holders
) -> list[Bools]:
    """For each sheet the rows that may be held twice: by two blocks, or two ranks with one."""
    found, first = [], 0
    for sheet, key in zip(sheets, keys, strict=True):
        end = first + len(sheet.digests)
        has_many = holders.count[first:end] > 1
        found.append(has_many[:, None] | ~distinct[key][None, :])
        first = end
    return found


def _check_tiling(
    sheets: Sequence[Sheet],
    keys: Sequence[Int32s],
    items: Sequence[Item],
    distinct: Bools,
    loose: Loose,
    groups: Groups,
) -> None:
    """Raise `SaveError` unless the boxes of every tensor cover it exactly once."""
    total: UInt64s = np.zeros(len(items), dtype=np.uint64)
    for sheet, key in zip(sheets, keys, strict=True):
        settled = np.flatnonzero(distinct[key])
        total[key[settled]] += np.add.reduce(sheet.mass, axis=0)[settled]
    first = groups.first
    sorted_out = first[~distinct[loose.key[first]]]
    np.add.at(total, loose.key[sorted_out], loose.mass[sorted_out])
    wrong = total != whole_masses([item.shape for item in items])
    repeated = np.flatnonzero(groups.count > 1)
    copies, box = groups.rows_of(repeated)
    unequal = loose.mass[copies] != loose.mass[first[repeated]][box]
    wrong[loose.key[copies[unequal]]] = True
    if not wrong.any():
        return
    names = [items[number].key for number in np.flatnonzero(wrong).tolist()]
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    raise SaveError(
        f"{', '.join(names[:_KEYS_SHOWN])}{more}: the ranks' parts do not cover the tensor "
        "exactly once; expected shards that neither overlap nor leave a gap, or the same whole "
        "tensor on every rank that has it"
    )


def _holders_write(
    sheets: Sequence[Sheet],
    weights: Sequence[Int64s],
    distinct: Bools,
    keys: Sequence[Int32s],
    holders: Holders,
    loads: Int64s,
) -> list[Int32s]:
    """Every row given to its first holder; to `loads` are added those that have no other."""
    writers, first = [], 0
    for sheet, weight, key in zip(sheets, weights, keys, strict=True):
        end = first + len(sheet.digests)
        holder = holders.first[first:end]
        writers.append(np.repeat(holder, sheet.place.shape[1]).reshape(sheet.place.shape))
        alone = holder[holders.count[first:end] == 1]
        np.add.at(loads, alone, weight[distinct[key]].sum())
        first = end
    return writers


def _locate(
    sheets: Sequence[Sheet], holdings: Sequence[Sequence[bytes]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The (sheet, line) of each rank's blocks, in the order of kinds."""
    where = {
        digest: (number, line)
        for number, sheet in enumerate(sheets)
        for line, digest in enumerate(sheet.digests)
    }
    return tuple(
        tuple(sorted((where[d] for d in held), key=lambda at: sheets[at[0]].pattern.kind))
        for held in holdings
    )


def _keep(
    sheets: Sequence[Sheet],
    weights: Sequence[Int64s],
    writers: Sequence[Int32s],
    held: Sequence[Sequence[tuple[int, int]]],
) -> tuple[tuple[Kept, ...], Int64s]:
    """The rows that each rank writes, and each rank's bytes."""
    kept = []
    file_bytes = np.zeros(len(held), dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int32)
    for rank, blocks in enumerate(held):
        its = [nothing] * len(KINDS)
        for sheet, line in blocks:
            rows = np.flatnonzero(writers[sheet][line] == rank).astype(np.int32)
            its[sheets[sheet].pattern.kind] = rows
            file_bytes[rank] += weights[sheet][rows].sum()
        kept.append(tuple(its))
    return tuple(kept), file_bytes


def _describe(item: Item) -> str:
    return "a number" if item.dtype is None else f"{item.dtype} of shape {item.shape}"
