"""The GPUs and ranks of each node at each size of a run. Pure functions.

The size of a run is its number of GPUs, as `elastic` counts them. A run without GPUs counts its
ranks instead.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from holdfast.contracts.plain_text import counted

NO_GRES: Final = "none"
# `gpu`, `gpu:2`, `gpu:h100`, `gpu:2080ti:2`. A kind is not all digits. No count means one GPU.
_GPUS: Final = re.compile(
    r"(?:^|,)(?:gres[/:])?gpu(?::([^:(,=]*[^0-9:(,=][^:(,=]*))?(?:[:=]([0-9]+))?(?=[(,]|$)"
)
# `(S:0-1)`, `(IDX:0,2-3)`: the location of the GPUs, which contains commas.
_IN_BRACKETS: Final = re.compile(r"\([^)]*\)")


class NodeShare(NamedTuple):
    """A number of nodes, and the GPUs and ranks of each."""

    nodes: int
    gpus: int
    ranks: int


def share_of(size: int, gpus_per_node: int, nproc_per_node: int | None = None) -> NodeShare:
    """Return the nodes for `size` GPUs, or for `size` ranks if nodes have no GPUs.

    `nproc_per_node` are the ranks of a whole node, None for one per GPU. A part of a node has the
    same part of its ranks. Raises `ValueError` when the size does not fill whole nodes, or when a
    part of a node has no whole number of ranks.
    """
    per_node, noun = gpus_per_node or nproc_per_node or 1, "GPUs" if gpus_per_node else "ranks"
    # Up to a whole node, any number of GPUs is a part of one. Beyond it only whole nodes count,
    # because a job asks for equally many GPUs on each of its nodes.
    nodes, rest = (1, 0) if size <= per_node else divmod(size, per_node)
    if rest:
        raise ValueError(
            f"{size} {noun} do not fill nodes of {per_node}: expected {per_node} or fewer, or a "
            f"multiple of {per_node}"
        )
    here = size // nodes
    # The ranks keep their ratio to the GPUs: with a fixed number, fewer GPUs would hold more ranks
    # each and run out of memory, see decision 57.
    ranks, rest = divmod(here * (nproc_per_node or per_node), per_node)
    if rest:
        raise ValueError(
            f"{counted(size, 'GPU')}: a part of a node that has {per_node} GPUs and "
            f"resources.nproc_per_node = {nproc_per_node} ranks, and its part of the ranks is no "
            f"whole number: expected a count whose {nproc_per_node}/{per_node} is whole"
        )
    return NodeShare(nodes, here if gpus_per_node else 0, ranks)


def problem_with_sizes(
    gpus_per_node: int, nproc_per_node: int | None, gres: str | None, gpu_type: str | None
) -> str:
    """Return why these values of `resources` contradict each other; empty if they do not."""
    if gpu_type and gres:
        return (
            f"resources.gpu_type {gpu_type!r} and resources.gres {gres!r}: expected one of them; "
            "gres can name the type itself"
        )
    if gpus_per_node == 0 and nproc_per_node is None:
        return (
            "resources.gpus_per_node 0: a run without GPUs needs resources.nproc_per_node, the "
            "number of ranks on each node"
        )
    # A `gres` without GPUs, such as `shard:8` or `none`, says nothing about them.
    wanted = gres if gres and gpus_of(gres) else gpu_type
    if gpus_per_node == 0 and wanted:
        return (
            f"resources.gpus_per_node 0 and {wanted!r}, which asks for GPUs: leave gres and "
            "gpu_type out, or set gpus_per_node"
        )
    if gres == NO_GRES and gpus_per_node and nproc_per_node:
        return (
            f"resources.gres 'none' requests no GPUs, but gpus_per_node is {gpus_per_node}: for "
            f"{nproc_per_node} ranks without GPUs set gpus_per_node = 0 and leave gres out"
        )
    return ""


def gpus_of(gres: str, kind: str = "") -> int:
    """Return the GPUs in a GRES such as `gpu:a100:4(S:0-1),shard:8`, only of `kind` if given."""
    found = _GPUS.findall(_IN_BRACKETS.sub("", gres))
    return sum(int(count or 1) for each, count in found if kind in {"", each})


def gpu_kind(gres: str) -> str:
    """Return the one GPU kind in a GRES string; '' if it names none or several."""
    kinds = {kind for kind, _ in _GPUS.findall(_IN_BRACKETS.sub("", gres)) if kind}
    return kinds.pop() if len(kinds) == 1 else ""
