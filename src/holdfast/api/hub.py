"""The live stream: one writer, the watch, and many readers, the open pages.

A message is made into text once, however many read it. A reader that comes back names the last
one it saw and gets what it missed while that is remembered; else it is told to ask anew.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from holdfast.api.problems import Refusal

REMEMBERED_MAX: Final = 5000
WAITING_MAX: Final = 2000
READERS_MAX: Final = 1000
RESET: Final = "reset"


@dataclass(frozen=True)
class Message:
    """One event of the stream: `data` is JSON, `run` the uid of the run it is about."""

    number: int
    event: str
    data: str
    run: str | None = None


class Hub:
    """Passes messages from any thread to the readers on the server's loop."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._recent: deque[Message] = deque(maxlen=REMEMBERED_MAX)
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[asyncio.Queue[Message | None]] = set()

    @property
    def readers(self) -> int:
        """How many read now."""
        return len(self._readers)

    def open(self) -> None:
        """Deliver on the loop that runs now."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every stream; the loop's own thread calls it."""
        for queue in self._readers:
            _put(queue, None)
        self._loop = None

    def publish(self, event: str, data: Any, run: str | None = None) -> None:
        """Tell all readers; never waits."""
        text = json.dumps(data, ensure_ascii=False, default=str)
        with self._lock:
            self._number += 1
            message = Message(self._number, event, text, run)
            self._recent.append(message)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._deliver, message)

    def identity(self, message: Message) -> str:
        """What a reader names to go on after `message`."""
        return f"{self._boot}-{message.number}"

    async def read(
        self, after: str | None, run: str | None, *, idle_s: float
    ) -> AsyncIterator[Message | None]:
        """Messages, of one run when its uid is given; None after `idle_s` seconds without one.

        Raises `Refusal` when there are too many readers.
        """
        if len(self._readers) >= READERS_MAX:
            raise Refusal(503, f"{READERS_MAX} streams are open already; close some, or poll")
        queue: asyncio.Queue[Message | None] = asyncio.Queue(WAITING_MAX)
        # On the loop's thread nothing is delivered between these two lines.
        missed = self._missed(after)
        self._readers.add(queue)
        last = missed[-1].number if missed else 0
        try:
            for message in missed:
                if run is None or message.run in {None, run}:
                    yield message
            while True:
                try:
                    next_one = await asyncio.wait_for(queue.get(), idle_s)
                except TimeoutError:
                    yield None
                    continue
                if next_one is None:
                    return
                if next_one.number > last and (run is None or next_one.run in {None, run}):
                    yield next_one
        finally:
            self._readers.discard(queue)

    def _missed(self, after: str | None) -> list[Message]:
        """A greeting, which bears the newest number, after what came since `after`."""
        with self._lock:
            recent, number = list(self._recent), self._number
        if after is None:
            return [Message(number, "hello", "{}")]
        boot, _, text = after.rpartition("-")
        seen = int(text) if text.isdigit() and len(text) < 19 else -1
        oldest = recent[0].number if recent else number + 1
        if boot != self._boot or seen > number or seen + 1 < oldest:
            return [Message(number, RESET, '{"reason": "too much was missed; ask anew"}')]
        return [m for m in recent if m.number > seen] or [Message(number, "hello", "{}")]

    def _deliver(self, message: Message) -> None:
        for queue in self._readers:
            _put(queue, message)


def _put(queue: asyncio.Queue[Message | None], message: Message | None) -> None:
    """Queue a message; a reader that is far behind loses what waits and is told so."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        if message is not None:
            message = Message(message.number, RESET, '{"reason": "the reader was too slow"}')
    queue.put_nowait(message)
