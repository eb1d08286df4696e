"""The event stream: one writer (the watch) and many readers (the open pages).

Messages are sent in batches every tenth of a second. All readers share the text of a batch, so
the cost of a reader does not grow with the number of messages. A reader that reconnects names
the last message it received. It gets the messages since then if they are still in memory, and
otherwise `reset`.
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
# Twenty seconds of batches. A reader that is further behind gets `reset`.
WAITING_MAX: Final = 200
READERS_MAX: Final = 1000
RESET: Final = "reset"


@dataclass(frozen=True)
class Message:
    """One event of the stream: `data` is JSON, `run` is the uid of the run it belongs to."""

    number: int
    event: str
    data: str
    run: str | None = None


class MessageBatch:
    """Messages that are sent together."""

    def __init__(self, boot: str, messages: Sequence[Message]) -> None:
        self._boot, self._messages = boot, messages
        self._texts: dict[str | None, bytes] = {}

    @property
    def last(self) -> int:
        return self._messages[-1].number

    def text(self, run: str | None, after: int) -> bytes:
        """Return the messages with numbers above `after` as server-sent events.

        With `run`, only the messages that belong to that run or to no run are included; the
        result may be empty. The text of a whole batch is built once per `run`.
        """
        # A reader in the middle of a batch is rare, so only whole batches are cached.
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
    """Passes messages from any thread to the readers on the server's event loop."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._recent: deque[Message] = deque(maxlen=REMEMBERED_MAX)
        self._gathered: list[Message] = []
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[asyncio.Queue[MessageBatch | None]] = set()

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def newest_id(self) -> str:
        """The id of the newest event. Data that is read later is at least as new."""
        return f"{self._boot}-{self._number}"

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Deliver the remaining messages and end every stream. Call it in the loop's thread."""
        self._deliver()
        for queue in self._readers:
            self._put(queue, None)
        self._loop = None

    def publish(self, event: str, data: Any, run: str | None = None) -> None:
        """Send a message to all readers within `GATHER_S` seconds. Does not block."""
        text = json.dumps(data, ensure_ascii=False, default=str)
        with self._lock:
            self._number += 1
            message = Message(self._number, event, text, run)
            self._recent.append(message)
            if self._loop is None:
                return
            self._gathered.append(message)
            # The first message starts the timer, so a batch is sent at most `GATHER_S` after it.
            if len(self._gathered) == 1:
                self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_S, self._deliver)

    async def read(
        self, after: str | None, run: str | None, *, idle_s: float
    ) -> AsyncIterator[bytes | None]:
        """Yield server-sent events, and None after each `idle_s` seconds without one.

        With `run`, a uid, only events of that run are yielded. `after` is the id of the last
        event that the reader received. Raises `Refusal` if too many streams are open.
        """
        if len(self._readers) >= READERS_MAX:
            raise Refusal(
                503, f"{READERS_MAX} event streams are open already; close some, or poll instead"
            )
        queue: asyncio.Queue[MessageBatch | None] = asyncio.Queue(WAITING_MAX)
        # Delivery runs in this thread too, so no batch can arrive between these two lines.
        missed = self._missed(after)
        self._readers.add(queue)
        last = missed[-1].number
        try:
            if text := MessageBatch(self._boot, missed).text(run, -1):
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
        """Return the messages after id `after`, or `hello` or `reset` with the newest number."""
        with self._lock:
            recent, number = list(self._recent), self._number
        if after is None:
            return [Message(number, "hello", "{}")]
        boot, _, text = after.rpartition("-")
        seen = int(text) if text.isdecimal() and len(text) < 19 else -1
        oldest = recent[0].number if recent else number + 1
        # The id is of an earlier process, or too old. Only reloading all data is safe.
        if boot != self._boot or seen > number or seen + 1 < oldest:
            reason = '{"reason": "some missed events are no longer available; reload all data"}'
            return [Message(number, RESET, reason)]
        return [m for m in recent if m.number > seen] or [Message(number, "hello", "{}")]

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        batch = MessageBatch(self._boot, gathered)
        for queue in self._readers:
            self._put(queue, batch)

    def _put(self, queue: asyncio.Queue[MessageBatch | None], batch: MessageBatch | None) -> None:
        """Queue a batch. If the queue is full, drop its content and send `reset` instead."""
        # One slow page must not hold the memory of all messages.
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            if batch is not None:
                reason = '{"reason": "the client read too slowly; reload all data"}'
                batch = MessageBatch(self._boot, [Message(batch.last, RESET, reason)])
        queue.put_nowait(batch)
