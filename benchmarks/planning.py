"""The cost of planning at a size that no test cluster has, with generated rows for every rank.

    python benchmarks/planning.py --ranks 10240 --tensors 1000

Run it by hand. It prints JSON with a row for each way to spread a state over the ranks: each part
on one rank, in the order of ranks (sharded) or, for every other tensor, in another order (crossed);
each part on eight ranks (hybrid); the same on all ranks (replicated). `describe_s` is one rank's
part (all ranks work at once). `pack_s` is one node's part. `unpickle_s` is rank 0's time to read
what all nodes sent, `decide_s` its time to plan for all ranks, and `cold_s` the sum of the four.
`sent_bytes` is what rank 0 receives from all nodes, `heard_bytes` what it sends to them. Their time
on the network is not included. `metadata_s` is the time for the `.metadata` of all boxes, which a
thread of rank 0 builds in the background. `cached_s` is what each later save pays to check that the
plan still fits.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch

from holdfast.trainer.format.columns import (
    PART,
    Block,
    Described,
    Item,
    Row,
    coverage_hashes,
    make_block,
    pack,
)
from holdfast.trainer.planning.global_plan import GlobalPlan
from holdfast.trainer.planning.metadata_pickle import MetadataPickle, count_rows
from holdfast.trainer.planning.rank_rows import describe_rank
from holdfast.trainer.planning.ranks import Contents, NodeIndex, Wanted, choose_sources, decide
from holdfast.trainer.planning.signature import Signature, flatten
from holdfast.trainer.ranks.identity import distcp_name

RANKS_PER_NODE: Final = 8
ROWS_PER_RANK: Final = 4
WAYS: Final = 8
COLUMNS: Final = 64
REPEATS: Final = 21
COLD: Final = ("describe_s", "pack_s", "unpickle_s", "decide_s")
# The number of ranks that hold the same part: one, groups of eight, all.
COPIES: Final = {"sharded": 1, "crossed": 1, "hybrid": 8, "replicated": 0}

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=10_240)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--spread", nargs="+", choices=COPIES, default=list(COPIES))
    parser.add_argument("--no-metadata", action="store_true", help="skip it; it needs gigabytes")
    options = parser.parse_args()
    own = measure_one_rank(options.tensors)
    found = {spread: own | measure_all(options, spread) for spread in options.spread}
    for row in found.values():
        row["cold_s"] = round(sum(row[name] for name in COLD), 4)
    print(
        json.dumps({"ranks": options.ranks, "tensors": options.tensors, "spread": found}, indent=1)
    )


def measure_one_rank(tensors: int) -> dict[str, Any]:
    """Measure the description of a rank's live state, and its check at a later save."""
    state = {
        "model": {f"layers.{n}.weight": torch.zeros(ROWS_PER_RANK, COLUMNS) for n in range(tensors)}
    }
    describe_s, _ = timed(lambda: describe_rank(state))
    signature = Signature(flatten(state))
    cached = [timed(lambda: signature.fits(flatten(state)))[0] for _ in range(REPEATS)]
    return {"describe_s": describe_s, "cached_s": statistics.median(cached)}


def measure_all(options: argparse.Namespace, spread: str) -> dict[str, Any]:
    """Measure rank 0's part."""
    copies = COPIES[spread] or options.ranks
    is_interleaved = spread == "crossed"
    blocks, common = make_blocks(
        options.ranks // copies, options.tensors, is_interleaved=is_interleaved
    )
    held = [digest for digest in blocks for _ in range(copies)]
    nodes = [
        range(first, min(first + RANKS_PER_NODE, len(held)))
        for first in range(0, len(held), RANKS_PER_NODE)
    ]
    names = (common.block.pattern,), (common.pattern.table,)
    indexes = [NodeIndex({rank: (held[rank],) for rank in node}, *names) for node in nodes]
    wanted = choose_sources(indexes)
    pack_s, _ = timed(lambda: pack({d: blocks[d] for d in wanted[0][0]}))
    sent = [pickle.dumps(content_of(blocks, common, wants)) for wants in wanted]
    unpickle_s, contents = timed(lambda: [pickle.loads(one) for one in sent])

    def plan() -> GlobalPlan:
        choose_sources(indexes)
        return decide(indexes, contents)

    decide_s, made = timed(plan)
    facts = {
        "pack_s": pack_s,
        "unpickle_s": unpickle_s,
        "decide_s": decide_s,
        "sent_bytes": sum(map(len, sent)),
        "heard_bytes": sum(kept.nbytes for pair in made.kept for kept in pair),
        "rows_written": int(count_rows(made).sum()),
    }
    if not options.no_metadata:
        contents.clear()
        content = MetadataPickle(made, distcp_name)
        memory = memoryview(bytearray(content.bytes))
        metadata_s, _ = timed(lambda: content.write_to(memory))
        facts |= {"metadata_s": metadata_s, "metadata_bytes": content.bytes}
    return facts


def content_of(blocks: Mapping[bytes, Block], common: Described, wanted: Wanted) -> Contents:
    """Return what one node sends of what it was asked for."""
    ours, patterns, tables = wanted
    return Contents(
        pack({digest: blocks[digest] for digest in ours}),
        dict.fromkeys(patterns, common.pattern),
        dict.fromkeys(tables, common.table),
    )


def make_blocks(
    parts: int, tensors: int, *, is_interleaved: bool = False
) -> tuple[dict[bytes, Block], Described]:
    """Return the blocks of `parts` ranks with equal shares of every tensor, and what they name.

    If interleaved, the shares of every other tensor rotate over the ranks, as in a 2-D mesh.
    """
    shape = (ROWS_PER_RANK * parts, COLUMNS)
    items = []
    for number in range(tensors):
        key = f"model.layers.{number}.weight"
        items.append(Item(key, ("model", f"layers.{number}.weight"), "float32", shape))
    sizes = (ROWS_PER_RANK, COLUMNS)
    first = make_block(PART, items, [Row(item, (0, 0), sizes, 1400) for item in items])
    offsets = [(ROWS_PER_RANK * part, 0) for part in range(parts)]
    weights = coverage_hashes(offsets, [sizes] * parts)
    blocks = {}
    for part in range(parts):
        share = np.full(tensors, part, dtype=np.int64)
        if is_interleaved:
            share[::2] = part * WAYS % parts + part * WAYS // parts
        place = ROWS_PER_RANK * COLUMNS * share
        block = replace(first.block, place=place, coverage_hash=weights[share])
        blocks[block.digest()] = block
    return blocks, first


def timed(act: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = act()
    return round(time.perf_counter() - began, 6), result


if __name__ == "__main__":
    main()
