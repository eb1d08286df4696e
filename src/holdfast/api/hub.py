"""The live stream: one writer, the watch, and many readers, the open pages.

News of a tenth of a second go out together, as one text that all readers of them share: what the
server does for a page does not grow with how much there is to tell. A reader that comes back
names the last message it saw and gets what it missed while that is remembered; else it is told to
ask again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.api.problems import Refusal

GATHER_S: Final = 0.1
REMEMBERED_MAX: Final = 5000
# Twenty seconds of news: a reader that is further behind is told to ask again.
WAITING_MAX: Final = 200
READERS_MAX: Final = 1000
RESET: Final = "reset"


@dataclass(frozen=True)
class Message:
    """One event of the stream: `data` is JSON, `run` the uid of the run it is about."""

    number: int
    event: str
    data: str
    run: str | None = None


class Batch:
    """Messages that go out together."""

    def __init__(self, boot: str, messages: Sequence[Message]) -> None:
        self._boot, self._messages = boot, messages
        self._texts: dict[str | None, bytes] = {}

    @property
    def last(self) -> int:
        """The number of the newest message."""
        return self._messages[-1].number

    def text(self, run: str | None, after: int) -> bytes:
        """The messages newer than number `after` as server-sent events, made once for each `run`.

        With `run`, those that are about it or about none; empty when there are none.
        """
        if after >= self._messages[0].number:
            return self._format(run, after)
        if run not in self._texts:
            self._texts[run] = self._format(run, after)
        return self._texts[run]

    def _format(self, run: str | None, after: int) -> bytes:
        return "".join(
            f"event: {one.event}\nid: {self._boot}-{one.number}\ndata: {one.data}\n\n"
            for one in self._messages
            if one.number > after and (run is None or one.run in {None, run})
        ).encode()


class Hub:
    """Passes messages from any thread to the readers on the server's loop."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._recent: deque[Message] = deque(maxlen=REMEMBERED_MAX)
        self._gathered: list[Message] = []
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[asyncio.Queue[Batch | None]] = set()

    @property
    def readers(self) -> int:
        """How many read now."""
        return len(self._readers)

    def open(self) -> None:
        """Deliver on the loop that runs now."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every stream, after what is there to tell; the loop's own thread calls it."""
        self._deliver()
        for queue in self._readers:
            self._put(queue, None)
        self._loop = None

    def publish(self, event: str, data: Any, run: str | None = None) -> None:
        """Tell all readers within `GATHER_S`; never waits."""
        text = json.dumps(data, ensure_ascii=False, default=str)
        with self._lock:
            self._number += 1
            message = Message(self._number, event, text, run)
            self._recent.append(message)
            if self._loop is None:
                return
            self._gathered.append(message)
            if len(self._gathered) == 1:
                self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_S, self._deliver)

    async def read(
        self, after: str | None, run: str | None, *, idle_s: float
    ) -> AsyncIterator[bytes | None]:
        """News as server-sent events, of one run when its uid is given; None whenever `idle_s`
        seconds passed without any, whatever other runs have to tell.

        Raises `Refusal` when there are too many readers.
        """
        if len(self._readers) >= READERS_MAX:
            raise Refusal(503, f"{READERS_MAX} streams are open already; close some, or poll")
        queue: asyncio.Queue[Batch | None] = asyncio.Queue(WAITING_MAX)
        # On the loop's thread nothing is delivered between these two lines.
        missed = self._missed(after)
        self._readers.add(queue)
        last = missed[-1].number
        try:
            if text := Batch(self._boot, missed).text(run, -1):
                yield text
            quiet_since = time.monotonic()
            while True:
                left_s = quiet_since + idle_s - time.monotonic()
                try:
                    batch = await asyncio.wait_for(queue.get(), max(0.0, left_s))
                except TimeoutError:
                    yield None
                    quiet_since = time.monotonic()
                    continue
                if batch is None:
                    return
                if text := batch.text(run, last):
                    yield text
                    quiet_since = time.monotonic()
        finally:
            self._readers.discard(queue)

    def _missed(self, after: str | None) -> list[Message]:
        """A greeting, which bears the newest number, or what came since `after`."""
        with self._lock:
            recent, number = list(self._recent), self._number
        if after is None:
            return [Message(number, "hello", "{}")]
        boot, _, text = after.rpartition("-")
        seen = int(text) if text.isdigit() and len(text) < 19 else -1
        oldest = recent[0].number if recent else number + 1
        if boot != self._boot or seen > number or seen + 1 < oldest:
            return [Message(number, RESET, '{"reason": "too much was missed; ask again"}')]
        return [m for m in recent if m.number > seen] or [Message(number, "hello", "{}")]

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        batch = Batch(self._boot, gathered)
        for queue in self._readers:
            self._put(queue, batch)

    def _put(self, queue: asyncio.Queue[Batch | None], batch: Batch | None) -> None:
        """Queue a batch; a reader that is far behind loses what waits and is told so."""
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            if batch is not None:
                reason = '{"reason": "the reader was too slow"}'
                batch = Batch(self._boot, [Message(batch.last, RESET, reason)])
        queue.put_nowait(batch)
