"""Has all flushers finish what is sealed, in slices, so that a deadline heard meanwhile counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from holdfast.workers.agent.runtime import Node

SLICE_S: Final = 2.0
SLICE_S_MIN: Final = 0.1


class AskAll(Protocol):
    """Has all nodes do the same at once; the answers of those that are there."""

    def __call__(self, act: Callable[[Node], bool], /) -> list[tuple[Node, bool]]: ...


def drain_all(
    ask_all: AskAll,
    lost: Callable[[], list[int]],
    until: Callable[[], float],
    *,
    mirror: bool,
) -> list[str]:
    """Wait until every flusher is through, or Unix time `until()`; names of nodes that were not.

    `lost()` are the numbers of the nodes whose files will not come. With `mirror`, copies too.
    """
    done: set[str] = set()
    late: list[str] = [""]
    while late and (left_s := until() - time.time()) > 0:
        slice_s, gone = max(SLICE_S_MIN, min(SLICE_S, left_s)), lost()

        answers = ask_all(
            partial(_drain, done=frozenset(done), slice_s=slice_s, lost=gone, mirror=mirror)
        )
        done |= {node.name for node, is_done in answers if is_done}
        late = [node.name for node, is_done in answers if not is_done]
    return [name for name in late if name]


def _drain(node: Node, done: frozenset[str], slice_s: float, lost: list[int], mirror: bool) -> bool:
    return node.name in done or node.drain(slice_s, lost, mirror=mirror)
