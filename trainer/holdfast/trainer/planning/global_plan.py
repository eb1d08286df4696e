"""Plan which rank writes what, for all ranks at once: rank 0's part of planning.

Exactly one of several equal boxes is written. Most boxes have one holder, which writes them. A box
with several holders goes to the one with the least to write. If its copies may differ, the lowest
rank writes it. All work is comparing and adding columns: Python loops run over keys, ranks and sets
of holders, never over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.contracts.errors import SaveError
from holdfast.trainer.format.columns import (
    FIRST,
    KINDS,
    Int32s,
    Int64s,
    Item,
    ShardTable,
    UInt64s,
    decode_table,
    whole_coverage_hashes,
)
from holdfast.trainer.planning.boxes import Bools, Groups, Loose, find_distinct, group, pick_loose
from holdfast.trainer.planning.writers import Holders, choose_writers

ALIGNMENT: Final = 64
_KEYS_SHOWN: Final = 5

Kept = tuple[Int32s, ...]
"""Rows that a rank writes, in file order: those of its block of each of the KINDS."""


@dataclass(frozen=True)
class GlobalPlan:
    """Which rank writes which row. A row is a column of a line of a shard table.

    `keys` gives for each shard table the index in `items` of each column. `writers` gives for each
    row, in shape (blocks, rows), the rank that writes it, `NOBODY` for none. `held` gives each
    rank's blocks as (shard_table, line), and `kept` the rows of them that it writes, by kind.
    """

    items: tuple[Item, ...]
    shard_tables: tuple[ShardTable, ...]
    keys: tuple[Int32s, ...]
    writers: tuple[Int32s, ...]
    held: tuple[tuple[tuple[int, int], ...], ...]
    kept: tuple[Kept, ...]
    file_bytes: Int64s


def plan_all(
    shard_tables: Sequence[ShardTable],
    tables: Mapping[bytes, bytes],
    holdings: Sequence[Sequence[bytes]],
) -> GlobalPlan:
    """Plan for all ranks. `holdings` has the digests of each rank's blocks, by rank.

    Raises `SaveError` if ranks disagree about a key, or if their parts do not tile a tensor.
    """
    items, keys = _number_keys(shard_tables, tables)
    weights = [
        align(shard_table.pattern.form_bytes)[shard_table.pattern.form]
        for shard_table in shard_tables
    ]
    holders = Holders.of(
        [digest for shard_table in shard_tables for digest in shard_table.digests], holdings
    )
    distinct = find_distinct(shard_tables, keys, items)
    is_loose = _find_loose(shard_tables, keys, distinct, holders)
    loose = pick_loose(shard_tables, keys, weights, is_loose)
    groups = group(loose.key, loose.place, items)
    _check_tiling(shard_tables, keys, items, distinct, loose, groups)
    loads = np.zeros(len(holdings), dtype=np.int64)
    writers = _holders_write(shard_tables, weights, distinct, keys, holders, loads)
    by_first = np.zeros(len(items), dtype=bool)
    for shard_table, key in zip(shard_tables, keys, strict=True):
        by_first[key] |= shard_table.pattern.kind == FIRST
    chosen, begin = choose_writers(loose, groups, holders, loads, by_first), 0
    for writer, rows in zip(writers, loose.at, strict=True):
        writer.ravel()[rows] = chosen[begin : begin + len(rows)]
        begin += len(rows)
    held = _locate(shard_tables, holdings)
    kept, file_bytes = _keep(shard_tables, weights, writers, held)
    return GlobalPlan(
        items, tuple(shard_tables), tuple(keys), tuple(writers), held, kept, file_bytes
    )


def align(lengths: Int64s) -> Int64s:
    """Round lengths up to the alignment of entries."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def offsets_of(lengths: Int64s) -> Int64s:
    """Return the aligned offset at which each entry of these lengths begins in a file."""
    aligned = align(lengths)
    return np.cumsum(aligned) - aligned


def _number_keys(
    shard_tables: Sequence[ShardTable], tables: Mapping[bytes, bytes]
) -> tuple[tuple[Item, ...], list[Int32s]]:
    """Return one list of items for all tables, and each shard table's column indices in it."""
    items: dict[str, Item] = {}
    number: dict[str, int] = {}
    numbers: dict[bytes, Int32s] = {}
    for digest in dict.fromkeys(one.pattern.table for one in shard_tables):
        found = []
        for item in decode_table(tables[digest]):
            known = items.setdefault(item.key, item)
            if known != item:
                raise SaveError(
                    f"{item.key}: one rank has {_describe(known)}, another {_describe(item)}. "
                    "Every rank must save the same tensor under one name"
                )
            found.append(number.setdefault(item.key, len(number)))
        numbers[digest] = np.array(found, dtype=np.int32)
    keys = [numbers[one.pattern.table][one.pattern.item] for one in shard_tables]
    return tuple(items.values()), keys


def _find_loose(
    shard_tables: Sequence[ShardTable], keys: Sequence[Int32s], distinct: Bools, holders: Holders
) -> list[Bools]:
    """Return for each shard table the rows that two blocks or two ranks may hold."""
    found, first = [], 0
    for shard_table, key in zip(shard_tables, keys, strict=True):
        end = first + len(shard_table.digests)
        has_many = holders.count[first:end] > 1
        found.append(has_many[:, None] | ~distinct[key][None, :])
        first = end
    return found


def _check_tiling(
    shard_tables: Sequence[ShardTable],
    keys: Sequence[Int32s],
    items: Sequence[Item],
    distinct: Bools,
    loose: Loose,
    groups: Groups,
) -> None:
    """Raise `SaveError` unless the boxes of every tensor cover it exactly once."""
    total: UInt64s = np.zeros(len(items), dtype=np.uint64)
    for shard_table, key in zip(shard_tables, keys, strict=True):
        decided = np.flatnonzero(distinct[key])
        total[key[decided]] += np.add.reduce(shard_table.coverage_hash, axis=0)[decided]
    first = groups.first
    sorted_out = first[~distinct[loose.key[first]]]
    np.add.at(total, loose.key[sorted_out], loose.coverage_hash[sorted_out])
    wrong = total != whole_coverage_hashes([item.shape for item in items])
    repeated = np.flatnonzero(groups.count > 1)
    copies, box = groups.rows_of(repeated)
    unequal = loose.coverage_hash[copies] != loose.coverage_hash[first[repeated]][box]
    wrong[loose.key[copies[unequal]]] = True
    if not wrong.any():
        return
    names = [items[number].key for number in np.flatnonzero(wrong).tolist()]
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    raise SaveError(
        f"{', '.join(names[:_KEYS_SHOWN])}{more}: the ranks' parts do not cover the tensor "
        "exactly once. Save shards that neither overlap nor leave a gap, or the same whole "
        "tensor on every rank that has it"
    )


def _holders_write(
    shard_tables: Sequence[ShardTable],
    weights: Sequence[Int64s],
    distinct: Bools,
    keys: Sequence[Int32s],
    holders: Holders,
    loads: Int64s,
) -> list[Int32s]:
    """Give every row to its first holder. Add the bytes of rows with one holder to `loads`."""
    writers, first = [], 0
    for shard_table, weight, key in zip(shard_tables, weights, keys, strict=True):
        end = first + len(shard_table.digests)
        holder = holders.first[first:end]
        writers.append(
            np.repeat(holder, shard_table.place.shape[1]).reshape(shard_table.place.shape)
        )
        alone = holder[holders.count[first:end] == 1]
        np.add.at(loads, alone, weight[distinct[key]].sum())
        first = end
    return writers


def _locate(
    shard_tables: Sequence[ShardTable], holdings: Sequence[Sequence[bytes]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (shard_table, line) of each rank's blocks, in the order of kinds."""
    where = {
        digest: (number, line)
        for number, shard_table in enumerate(shard_tables)
        for line, digest in enumerate(shard_table.digests)
    }
    return tuple(
        tuple(sorted((where[d] for d in held), key=lambda at: shard_tables[at[0]].pattern.kind))
        for held in holdings
    )


def _keep(
    shard_tables: Sequence[ShardTable],
    weights: Sequence[Int64s],
    writers: Sequence[Int32s],
    held: Sequence[Sequence[tuple[int, int]]],
) -> tuple[tuple[Kept, ...], Int64s]:
    """Return the rows that each rank writes, and the bytes of each rank's file."""
    kept = []
    file_bytes = np.zeros(len(held), dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int32)
    for rank, blocks in enumerate(held):
        its = [nothing] * len(KINDS)
        for shard_table, line in blocks:
            rows = np.flatnonzero(writers[shard_table][line] == rank).astype(np.int32)
            its[shard_tables[shard_table].pattern.kind] = rows
            file_bytes[rank] += weights[shard_table][rows].sum()
        kept.append(tuple(its))
    return tuple(kept), file_bytes


def _describe(item: Item) -> str:
    return "a number" if item.dtype is None else f"{item.dtype} of shape {item.shape}"
