"""Drain all flushers in short slices, so that a deadline that arrives meanwhile applies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from holdfast.contracts.node import clocks
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup

SLICE_S: Final = 2.0
SLICE_S_MIN: Final = 0.1


def drain_all(group: NodeGroup, until: Callable[[], float], *, mirror: bool) -> list[str]:
    """Wait for all flushers, at most until Unix time `until()`; return the nodes that were late.

    The files of lost nodes are not waited for. With `mirror`, copies to the mirror are waited for
    too.
    """
    done: set[str] = set()
    late: list[str] = [""]
    while late and (left_s := until() - clocks.now()) > 0:
        slice_s, lost = max(SLICE_S_MIN, min(SLICE_S, left_s)), group.lost_numbers
        drain = partial(_drain, done=frozenset(done), slice_s=slice_s, lost=lost, mirror=mirror)
        answers = group.ask_all(drain)
        done |= {node.name for node, is_done in answers if is_done}
        late = [node.name for node, is_done in answers if not is_done]
    return [name for name in late if name]


def _drain(
    node: LedNode, done: frozenset[str], slice_s: float, lost: list[int], mirror: bool
) -> bool | Future[bool]:
    return node.name in done or node.drain(slice_s, lost, mirror=mirror)
