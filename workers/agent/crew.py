"""Threads that ask all nodes at once, so that a silent node does not delay the others."""

from __future__ import annotations

import concurrent.futures
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from holdfast.contracts.errors import AgreementError

THREADS_MAX: Final = 256
LOOK_S: Final = 0.5
# Ranks wait at a step while a proposal is open. A node that is silent for this long refuses it.
AGREE_WAIT_S: Final = 5.0

NodeT = TypeVar("NodeT")
T = TypeVar("T")


class Named(Protocol):
    """The part of a node that a crew needs."""

    @property
    def name(self) -> str: ...


class Crew:
    """Threads that talk to the other nodes of an attempt; each waits for one answer at a time."""

    def __init__(self, nodes: int) -> None:
        self._pool = ThreadPoolExecutor(max(1, min(nodes, THREADS_MAX)), thread_name_prefix="crew")

    def begin(self, act: Callable[[NodeT], T], node: NodeT) -> Future[T]:
        """Ask one node; the future holds the answer."""
        return self._pool.submit(act, node)

    def post(self, act: Callable[[], object]) -> None:
        """Send a node a message without waiting for its answer. A lost node is found elsewhere."""
        self._pool.submit(act).add_done_callback(_log_failure)

    def agree(
        self, ports: Sequence[NodeT], ask: Callable[[NodeT], T], *, wait_s: float = AGREE_WAIT_S
    ) -> list[T]:
        """Return every port's answer; the first port is asked in this thread.

        All ports are asked. Raises `ConnectionError` if a node is lost, and `AgreementError` if a
        node has not answered within `wait_s` seconds.
        """
        asked = [self.begin(ask, port) for port in ports[1:]]
        answers = [ask(port) for port in ports[:1]]
        late = concurrent.futures.wait(asked, wait_s).not_done
        if late:
            raise AgreementError(
                f"{len(late)} of {len(ports)} nodes did not answer within {wait_s:.1f} s"
            )
        return answers + [future.result() for future in asked]

    def close(self) -> None:
        """Start no more calls. A thread that waits for an answer ends with its connection."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def await_result(future: Future[T], give_up_at: Callable[[], float]) -> T:
    """Return the future's result; raise `ConnectionError` at Unix time `give_up_at()`."""
    while not concurrent.futures.wait([future], LOOK_S).done:
        if time.time() > give_up_at():
            raise ConnectionError("the node did not answer before the deadline of the stop")
    return future.result()


def any_silent(nodes: Collection[Any]) -> bool:
    """Return True if a node has left a question unanswered for longer than a proposal may wait."""
    return any(getattr(node, "waiting_s", 0.0) > AGREE_WAIT_S for node in nodes)


def _log_failure(future: Future[object]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, ConnectionError):
        traceback.print_exception(error, file=sys.stderr)
