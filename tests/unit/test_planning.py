"""The plan for all ranks: each box is written once, by a rank that holds it, without overlap."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from holdfast.contracts.errors import SaveError
from holdfast.trainer.format.columns import (
    KINDS,
    OWN,
    PART,
    WHOLE,
    Block,
    BlockPattern,
    Item,
    Row,
    make_block,
    pack,
)
from holdfast.trainer.format.metadata import parse_metadata
from holdfast.trainer.planning.compare_keys import is_of_one_rank
from holdfast.trainer.planning.global_plan import ALIGNMENT, GlobalPlan
from holdfast.trainer.planning.layout import encode, make_template, plan_layout
from holdfast.trainer.planning.metadata_pickle import MetadataPickle
from holdfast.trainer.planning.rank_rows import describe_rank
from holdfast.trainer.planning.ranks import Contents, NodeIndex, choose_sources, decide
from holdfast.trainer.planning.signature import Signature, flatten
from holdfast.trainer.ranks.identity import distcp_name

HEADER_BYTES = 700


@dataclass(frozen=True)
class Rank:
    """The rows of one rank, as the rank describes them."""

    blocks: dict[bytes, Block]
    patterns: dict[bytes, BlockPattern]
    tables: dict[bytes, bytes]
    rows: tuple[list[Row], ...]


def pickle_metadata(plan: GlobalPlan) -> bytes:
    """The content of `.metadata` for a plan."""
    content = MetadataPickle(plan, distcp_name)
    memory = bytearray(content.bytes)
    content.write_to(memoryview(memory))
    return bytes(memory)


def row_of(key: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Row:
    item = Item(key, tuple(key.split(".")), "float32", tuple(shape))
    return Row(item, tuple(offsets), tuple(sizes), HEADER_BYTES + 4 * prod(sizes))


def number_of(key: str, entry_bytes: int = 600) -> Row:
    return Row(Item(key, (key,), None, ()), (), (), entry_bytes)


def rank_of(rows: Sequence[Row], lacking: Sequence[Item] = ()) -> Rank:
    """A rank with `rows` and without any part of the items in `lacking`."""
    blocks, patterns, tables, parts = {}, {}, {}, []
    for kind in KINDS:
        mine = [row for row in rows if kind_of(row) == kind]
        items = [row.item for row in mine] + (list(lacking) if kind == PART else [])
        block, pattern, table = make_block(kind, items, mine)
        blocks[block.digest()] = block
        patterns[block.pattern] = pattern
        tables[pattern.table] = table
        parts.append(mine)
    return Rank(blocks, patterns, tables, tuple(parts))


def kind_of(row: Row) -> int:
    if is_of_one_rank(row.item.key):
        return OWN
    return WHOLE if row.is_whole else PART


def plan(ranks: Sequence[Rank], ranks_per_node: int = 2) -> GlobalPlan:
    """The plan, made by the same steps as on a cluster."""
    every = range(len(ranks))
    nodes = [every[at : at + ranks_per_node] for at in every[::ranks_per_node]]
    indexes, have = [], []
    for node in nodes:
        blocks = {d: b for rank in node for d, b in ranks[rank].blocks.items()}
        patterns = {d: p for rank in node for d, p in ranks[rank].patterns.items()}
        tables = {d: t for rank in node for d, t in ranks[rank].tables.items()}
        have.append((blocks, patterns, tables))
        held = {rank: tuple(ranks[rank].blocks) for rank in node}
        indexes.append(NodeIndex(held, tuple(patterns), tuple(tables)))
    contents = [
        Contents(
            pack({d: has[0][d] for d in wanted[0]}),
            {d: has[1][d] for d in wanted[1]},
            {d: has[2][d] for d in wanted[2]},
        )
        for has, wanted in zip(have, choose_sources(indexes), strict=True)
    ]
    assert sum(len(c.rows.digests) for c in contents) == len({d for r in ranks for d in r.blocks})
    return decide(indexes, contents)


def written_by(ranks: Sequence[Rank], made: GlobalPlan) -> list[list[Row]]:
    """Each rank's rows in the order of its file."""
    return [
        [rank.rows[kind][row] for kind in KINDS for row in kept[kind].tolist()]
        for rank, kept in zip(ranks, made.kept, strict=True)
    ]


def stock_metadata(ranks: Sequence[Rank]) -> Metadata:
    """What stock DCP plans for the same boxes."""
    planner = DefaultSavePlanner()
    plans = []
    for rank in ranks:
        items = [stock_item(row) for rows in rank.rows for row in rows]
        paths = {row.item.key: row.item.path for rows in rank.rows for row in rows}
        plans.append(SavePlan(items, planner_data=paths))
    return planner.create_global_plan(plans)[1]


def stock_item(row: Row) -> WriteItem:
    if row.item.dtype is None:
        return WriteItem(MetadataIndex(row.item.key), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(row.offsets), torch.Size(row.sizes))
    return WriteItem(
        MetadataIndex(row.item.key, row.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties(torch.float32), torch.Size(row.item.shape)
        ),
    )


def coverage(metadata: Metadata) -> dict[str, Any]:
    """The entries and sorted boxes of a metadata, for comparison."""
    found: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        found[key] = (type(entry), metadata.planner_data[key])
        if isinstance(entry, TensorStorageMetadata):
            boxes = sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
            found[key] += (entry.size, entry.properties, boxes)
    return found


@st.composite
def clusters(draw: st.DrawFn) -> list[Rank]:
    """Ranks with tensors that are each cut along a grid; every cell is held by one rank or
    more."""
    count = draw(st.integers(1, 6))
    rows: list[list[Row]] = [[] for _ in range(count)]
    lacking: list[list[Item]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 7), max_size=3))
        cuts = [sorted(draw(st.sets(st.integers(1, n), max_size=2)) | {0, n}) for n in shape]
        sides = [list(itertools.pairwise(cut)) for cut in cuts]
        for cell in itertools.product(*sides):
            row = row_of(f"model.t{number}", shape, [a for a, _ in cell], [b - a for a, b in cell])
            free = [r for r in range(count) if row.item not in [o.item for o in rows[r]]]
            if not free:
                break
            for rank in draw(st.sets(st.sampled_from(free), min_size=1)):
                rows[rank].append(row)
        else:
            for rank in range(count):
                if not any(row.item.key == f"model.t{number}" for row in rows[rank]):
                    lacking[rank].append(row_of(f"model.t{number}", shape, (), ()).item)
            continue
        # More cells than ranks: rank 0 holds the whole tensor instead.
        for rank in range(count):
            rows[rank] = [row for row in rows[rank] if row.item.key != f"model.t{number}"]
        rows[0].append(row_of(f"model.t{number}", shape, [0] * len(shape), shape))
    for rank in range(count):
        rows[rank].append(number_of("optimizer.lr", 600 + 10 * rank))
        rows[rank].append(row_of(f"rng.rank{rank:05d}", (16,), (0,), (16,)))
    return [rank_of(own, absent) for own, absent in zip(rows, lacking, strict=True)]


@pytest.mark.more
@settings(max_examples=150, deadline=None)
@given(clusters(), st.integers(1, 3))
def test_every_box_is_written_once_without_overlap(ranks: list[Rank], ranks_per_node: int) -> None:
    made = plan(ranks, ranks_per_node)
    written = written_by(ranks, made)
    boxes = Counter((row.item.key, row.offsets) for rows in written for row in rows)
    held = {(row.item.key, row.offsets) for rank in ranks for rows in rank.rows for row in rows}
    assert set(boxes) == held
    assert set(boxes.values()) == {1}
    content = pickle_metadata(made)
    metadata = parse_metadata(content, "made")
    assert coverage(metadata) == coverage(stock_metadata(ranks))
    places = {
        index: info for index, info in metadata.storage_data.items() if info.offset % ALIGNMENT == 0
    }
    assert len(places) == len(held)
    for rank, rows in enumerate(written):
        end = 0
        for row in rows:
            offset = None if row.item.dtype is None else torch.Size(row.offsets)
            info = places[MetadataIndex(row.item.key, offset)]
            assert (info.relative_path, info.length) == (distcp_name(rank), row.entry_bytes)
            assert end <= info.offset < end + ALIGNMENT
            end = info.offset + info.length
        assert end <= made.file_bytes[rank] < end + ALIGNMENT


def test_copies_are_spread_evenly_over_the_ranks_that_hold_them() -> None:
    whole = [row_of(f"model.{n}", (10 * n + 1, 3), (0, 0), (10 * n + 1, 3)) for n in range(40)]
    alone = row_of("rng.rank00000", (2000,), (0,), (2000,))
    ranks = [rank_of([*whole, *([alone] if rank == 0 else [])]) for rank in range(5)]
    made = plan(ranks)
    largest = max(-(-row.entry_bytes // ALIGNMENT) * ALIGNMENT for row in whole)
    assert made.file_bytes.max() - made.file_bytes.min() <= largest
    # Two groups of copies share ranks: the group with fewer holders is assigned first.
    pair = [row_of(f"pair.{n}", (50, 3), (0, 0), (50, 3)) for n in range(20)]
    lacking = [row.item for row in pair]
    ranks = [
        rank_of([*whole, *(pair if rank < 2 else [])], lacking if rank >= 2 else [])
        for rank in range(5)
    ]
    made = plan(ranks)
    assert made.file_bytes.max() - made.file_bytes.min() <= largest


def test_the_plan_of_the_same_ranks_is_the_same() -> None:
    rows = [row_of(f"model.{n}", (n + 1,), (0,), (n + 1,)) for n in range(30)]
    plans = [plan([rank_of(rows) for _ in range(4)]) for _ in range(2)]
    assert pickle_metadata(plans[0]) == pickle_metadata(plans[1])


HALF = row_of("model.w", (4, 2), (0, 0), (2, 2))
OTHER_HALF = row_of("model.w", (4, 2), (2, 0), (2, 2))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param([[HALF], [HALF]], r"model\.w: the ranks' parts do not cover", id="gap"),
        pytest.param(
            [[HALF], [row_of("model.w", (4, 2), (1, 0), (2, 2))]],
            r"model\.w: the ranks' parts do not cover",
            id="overlap of the right volume",
        ),
        pytest.param(
            [[row_of("model.w", (4, 2), (0, 0), (4, 2))], [HALF], [OTHER_HALF]],
            r"model\.w: the ranks' parts do not cover",
            id="two sizes at one place",
        ),
        pytest.param(
            [[row_of("model.w", (4,), (0,), (4,))], [row_of("model.w", (5,), (0,), (5,))]],
            r"model\.w: one rank has float32 of shape \(4,\), another float32 of shape \(5,\)",
            id="two shapes",
        ),
        pytest.param(
            [[number_of("model.w")], [row_of("model.w", (5,), (0,), (5,))]],
            r"model\.w: one rank has a number, another float32",
            id="a number and a tensor",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_by_name(
    rows: list[list[Row]], problem: str
) -> None:
    with pytest.raises(SaveError, match=problem):
        plan([rank_of(own) for own in rows])


def test_a_part_outside_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.w: a part of sizes \(2, 2\) at \(3, 0\) exceeds"):
        rank_of([row_of("model.w", (4, 2), (3, 0), (2, 2))])


def test_a_large_grid_in_shuffled_rank_order_is_planned() -> None:
    """A plan of 64 ranks in a shuffled grid, with large offsets."""
    order = np.random.default_rng(3).permutation(64).tolist()
    shape = (8 * 1000, 8 * 300_000_000)
    ranks = [
        rank_of([row_of("big", shape, (n // 8 * 1000, n % 8 * 300_000_000), (1000, 300_000_000))])
        for n in order
    ]
    made = plan(ranks, 8)
    metadata = parse_metadata(pickle_metadata(made), "made")
    for rank, n in enumerate(order):
        where = torch.Size((n // 8 * 1000, n % 8 * 300_000_000))
        assert metadata.storage_data[MetadataIndex("big", where)].relative_path == distcp_name(rank)
    entry = metadata.state_dict_metadata["big"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size(shape)
    plain = pickle.loads(pickle_metadata(made))
    assert plain.storage_data == metadata.storage_data


def test_a_state_is_flattened_like_stock_dcp_and_compared_with_its_plan() -> None:
    nested: dict[Any, Any] = {
        "a": {"b": torch.zeros(2), "c": [1, 2]},
        "d": [torch.zeros(1), {"e": 1.5}],
        "f": (0.9, 0.999),
        3: {"g": None},
    }
    flat = flatten(nested)
    assert flat.keys() == flatten_state_dict(nested)[0].keys()
    known = Signature(flat)
    assert known.fits({**flat, "a.c": [3], "f": "other"})
    assert not known.fits({**flat, "f": torch.zeros(1)})
    assert not known.fits({**flat, "a.b": torch.zeros(2, dtype=torch.float64)})
    assert not known.fits({k: v for k, v in flat.items() if k != "f"})
    layout = plan_layout("__0_0.distcp", [], known)
    with pytest.raises(
        SaveError, match=r"a\.b: torch\.float32 \(3,\), planned torch.float32 \(2,\)"
    ):
        layout.signature.check({**flat, "a.b": torch.zeros(3)})


def test_a_rank_describes_only_what_it_has() -> None:
    rows = describe_rank({"m": {"w": torch.zeros(2, 3)}, "rng": {"rank00002": torch.zeros(4)}})
    assert [entry.key for entry in rows.entries[WHOLE]] == ["m.w"]
    assert [entry.key for entry in rows.entries[OWN]] == ["rng.rank00002"]
    same = describe_rank({"m": {"w": torch.ones(2, 3)}, "rng": {"rank00005": torch.zeros(4)}})
    assert len(set(rows.blocks) & set(same.blocks)) == 1


def test_a_chunk_that_is_larger_than_memory_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan needs the headers of a chunk and no memory for it, in any mode of the kernel."""
    for shape in (torch.Size((1 << 20, 1 << 20)), torch.Size((1 << 42,))):
        template = make_template(shape, torch.float32)
        assert template.length - 4 * shape.numel() < 1 << 16
    # The zip is that of a tensor in memory.
    monkeypatch.setattr("holdfast.trainer.planning.layout.MAPPED_BYTES_MIN", 1)
    for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.float4_e2m1fn_x2, torch.bool):
        tensor = torch.zeros((3, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        content = encode(tensor)
        made = make_template(tensor.shape, dtype, crc=True)
        header = made.pieces[0][1][: made.data_at]
        assert (header, made.length) == (content[: made.data_at], len(content))
