"""Plan a layout with all ranks. These are the only collectives of saving, before the first save.

Each rank describes its state as columns (`rank_rows`). The first rank of each node collects those
of its node, and rank 0 plans for all (`global_plan`). Each content is sent once per digest, so
ranks with equal content add no cost. An error on one rank is raised on every rank, so that no rank
waits for another.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import psutil

from holdfast.contracts.errors import SaveError
from holdfast.contracts.node.limits import group_room
from holdfast.trainer.format.columns import KINDS, Block, BlockPattern, Rows, join, pack
from holdfast.trainer.planning.global_plan import GlobalPlan, Kept, plan_all
from holdfast.trainer.planning.layout import Layout, add_metadata, add_train_state, plan_layout
from holdfast.trainer.planning.metadata_pickle import MetadataPickle
from holdfast.trainer.planning.rank_rows import RankRows, describe_rank
from holdfast.trainer.ranks.collective import HierarchicalGroup, attempt, problem_of
from holdfast.trainer.ranks.identity import Identity, distcp_name
from holdfast.trainer.slots.modes import KEY, MEMORY, ON_DISK, SINGLE, Staging, default_directory
from holdfast.trainer.slots.slots import SLOTS_PER_RANK

T = TypeVar("T")
GIB: Final = 1024**3

Digests = tuple[bytes, ...]
Wanted = tuple[Digests, Digests, Digests]
"""Blocks, patterns and tables, by digest."""


@dataclass(frozen=True)
class NodeIndex:
    """The digests that a node has: each rank's blocks, and the blocks' patterns and tables."""

    ranks: Mapping[int, Digests]
    patterns: Digests
    tables: Digests


@dataclass(frozen=True)
class Contents:
    """The blocks, patterns and tables that one node was asked to send."""

    rows: Rows
    patterns: Mapping[bytes, BlockPattern]
    tables: Mapping[bytes, bytes]


@dataclass(frozen=True)
class Reply:
    """The root's answer to a rank: the rows that it writes, and `.metadata` if it writes that.

    Only the root writes `.metadata`, so it is never sent.
    """

    kept: Kept
    metadata: MetadataPickle | None


def plan_together(
    state: Mapping[str, Any],
    *,
    identity: Identity,
    tree: HierarchicalGroup,
    stage_tree: HierarchicalGroup,
    prepare: Callable[[], None],
) -> Layout:
    """Return this rank's layout. Every rank of `tree` calls this with its own part of the state.

    The ranks of `stage_tree` plan together: those of a pipeline stage, or else all. Each of
    several equal boxes is written once, balanced by bytes. `prepare` is called first. Raises
    `SaveError` on all ranks of `tree`.
    """

    def describe() -> RankRows:
        prepare()
        return describe_rank(state)

    own = all_or_none(tree, identity.rank, describe)
    reply, problem = _ask(own, stage_tree, identity.rank)
    # Every rank raises, because a rank that continues alone would wait in the next collective.
    raise_problems(tree.agree(problem if stage_tree.is_root else None))
    assert reply is not None
    entries = [own.entries[kind][row] for kind in KINDS for row in reply.kept[kind].tolist()]
    layout = plan_layout(identity.file_name, entries, own.signature)
    if reply.metadata is not None:
        layout = add_metadata(layout, reply.metadata, identity.folder)
    return layout if identity.rank else add_train_state(layout)


def all_or_none(tree: HierarchicalGroup, rank: int, act: Callable[[], T]) -> T:
    """Run `act` on every rank and return its result. Raises `SaveError` on all if one failed."""
    result, error = attempt(act)
    raise_problems(tree.agree(problem_of(error, rank)))
    return cast(T, result)


def check_memory(
    tree: HierarchicalGroup, node: int, image_bytes: int, staging: Staging = MEMORY
) -> None:
    """Raise `SaveError` on all ranks if a node's staging slots exceed its free memory.

    Free memory is what the machine and the job's control group have left. The slots that the new
    ones replace were released before. Slots on a disk need none.
    """
    images = tree.gather_node(image_bytes)
    room = group_room()
    available = psutil.virtual_memory().available
    # The job's limit is often far below the machine's memory, and the kernel kills at the lower
    # one.
    if room is not None:
        available = min(available, room)
    problem = find_shortage(node, images, available, staging) if tree.is_first else None
    raise_problems(tree.agree(problem))


def find_shortage(
    node: int, images_bytes: Sequence[int], available: int, staging: Staging = MEMORY
) -> str | None:
    """Return an error if the slots of a node's ranks need more than the `available` bytes."""
    needed = staging.slots * sum(images_bytes)
    if staging.is_on_disk or needed <= available:
        return None
    slots = "1 staging slot" if staging.slots == 1 else f"{staging.slots} staging slots"
    return (
        f"node {node}: {slots} for each of {len(images_bytes)} ranks need "
        f"{needed / GIB:.2f} GiB, but {available / GIB:.2f} GiB are free. "
        f"{_what_fits(sum(images_bytes), available, staging)}Use more nodes, "
        "shard the state further, or request more memory from the scheduler"
    )


def _what_fits(images_bytes: int, available: int, staging: Staging) -> str:
    """Return which other values of `checkpoint.staging` fit, as a sentence, "" if none does."""
    fits = []
    if staging.slots > 1 and images_bytes <= available:
        fits.append(
            f"{KEY} = '{SINGLE}' fits: one slot for each needs {images_bytes / GIB:.2f} GiB"
        )
    directory = staging.directory or default_directory()
    if directory is not None:
        free, needed = shutil.disk_usage(directory).free, SLOTS_PER_RANK * images_bytes
        if needed <= free:
            fits.append(
                f"{KEY} = '{ON_DISK}' fits: it needs {needed / GIB:.2f} GiB in {directory}, which "
                f"has {free / GIB:.2f} GiB"
            )
    return "".join(f"{one}. " for one in fits)


def raise_problems(problems: Sequence[str]) -> None:
    if problems:
        raise SaveError(f"no rank saves, because of {'; '.join(problems)}")


# --- messages between ranks -------------------------------------------------------------------


def _ask(own: RankRows, tree: HierarchicalGroup, rank: int) -> tuple[Reply | None, str | None]:
    """Send this rank's rows to the root and return its reply, or the problem that all have."""
    mates = tree.gather_node((own.blocks, own.patterns, own.tables))
    if not tree.is_first:
        reply, problem = tree.scatter_node([])
        return reply, problem
    blocks: dict[bytes, Block] = {}
    patterns: dict[bytes, BlockPattern] = {}
    tables: dict[bytes, bytes] = {}
    for its_blocks, its_patterns, its_tables in mates:
        blocks |= its_blocks
        patterns |= its_patterns
        tables |= its_tables
    # Ranks that hold the same boxes send the same block, which travels once, see decision 8.
    digests = {rank: tuple(mate[0]) for rank, mate in zip(tree.mates, mates, strict=True)}
    indexes = tree.gather_firsts(NodeIndex(digests, tuple(patterns), tuple(tables)))
    wanted: Wanted = tree.scatter_firsts(choose_sources(indexes))
    contents = tree.gather_firsts(
        Contents(
            pack({d: blocks[d] for d in wanted[0]}),
            {d: patterns[d] for d in wanted[1]},
            {d: tables[d] for d in wanted[2]},
        )
    )
    answer = tree.scatter_firsts(_decide(indexes, contents, rank) if tree.is_root else [])
    replies: Sequence[Any] = tree.scatter_node(answer)
    reply, problem = replies
    return reply, problem


def choose_sources(indexes: Sequence[NodeIndex]) -> list[Wanted]:
    """Choose what each node sends: each content comes from the first node that has it."""
    chosen: list[Wanted] = []
    seen: set[bytes] = set()
    for index in indexes:
        blocks = tuple(dict.fromkeys(d for held in index.ranks.values() for d in held))
        wanted = [
            tuple(d for d in s if d not in seen) for s in (blocks, index.patterns, index.tables)
        ]
        for digests in wanted:
            seen.update(digests)
        chosen.append((wanted[0], wanted[1], wanted[2]))
    return chosen


def decide(indexes: Sequence[NodeIndex], contents: Sequence[Contents]) -> GlobalPlan:
    """Return the plan for all ranks from all nodes' rows. Raises `SaveError`."""
    holdings = {rank: held for index in indexes for rank, held in index.ranks.items()}
    tables = {digest: table for node in contents for digest, table in node.tables.items()}
    patterns = {digest: one for node in contents for digest, one in node.patterns.items()}
    by_rank = [holdings[rank] for rank in sorted(holdings)]
    return plan_all(join([node.rows for node in contents], patterns), tables, by_rank)


def _decide(
    indexes: Sequence[NodeIndex], contents: Sequence[Contents], root: int
) -> list[list[tuple[Reply | None, str | None]]]:
    """Return a reply for each rank of each node, the same problem for all if planning failed."""

    def plan() -> tuple[GlobalPlan, MetadataPickle]:
        made = decide(indexes, contents)
        return made, MetadataPickle(made, distcp_name)

    found, error = attempt(plan)
    if found is None:
        return [[(None, problem_of(error, root))] * len(index.ranks) for index in indexes]
    made, metadata = found
    return [
        [(Reply(made.kept[rank], None if rank else metadata), None) for rank in index.ranks]
        for index in indexes
    ]
