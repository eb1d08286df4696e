"""The event stream: batches, and what a reader gets that reconnects or is too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.api import hub as module
from holdfast.api.hub import Hub

IDLE_S = 5.0
pytestmark = pytest.mark.filterwarnings("error")


def numbers(text: bytes | None) -> list[int]:
    """The message numbers in one part of a stream."""
    assert text is not None
    lines = text.decode().splitlines()
    return [int(line.rpartition("-")[2]) for line in lines if line.startswith("id: ")]


def last_event_id(text: bytes | None) -> str:
    """The id that a reader sends when it reconnects."""
    assert text is not None
    return next(
        line.removeprefix("id: ")
        for line in reversed(text.decode().splitlines())
        if line.startswith("id: ")
    )


async def open_reader(
    hub: Hub, after: str | None = None, run: str | None = None
) -> tuple[AsyncIterator[bytes | None], bytes | None]:
    """A reader and the first message that it got."""
    reader = hub.read(after, run, idle_s=IDLE_S)
    return reader, await anext(reader)


def test_events_published_together_are_sent_in_one_batch_in_order() -> None:
    async def read() -> tuple[bytes | None, bytes | None]:
        hub = Hub()
        hub.open()
        one, _ = await open_reader(hub)
        other, _ = await open_reader(hub)
        for step in range(50):
            hub.publish("beat", {"step": step}, "a")
        return await anext(one), await anext(other)

    text, same = asyncio.run(read())
    assert numbers(text) == list(range(1, 51))
    assert same is text


def test_a_reader_of_one_run_gets_only_that_runs_events() -> None:
    async def read() -> bytes | None:
        hub = Hub()
        hub.open()
        reader, _ = await open_reader(hub, run="a")
        for number in range(6):
            hub.publish("beat", {}, "ab"[number % 2])
        return await anext(reader)

    assert numbers(asyncio.run(read())) == [1, 3, 5]


def test_a_reconnecting_reader_gets_missed_events_exactly_once() -> None:
    async def read() -> tuple[bytes | None, bytes | None]:
        hub = Hub()
        hub.open()
        first, _hello = await open_reader(hub)
        hub.publish("run", {}, "a")
        seen = last_event_id(await anext(first))
        hub.publish("run", {}, "a")
        # Its second message is remembered and not delivered yet.
        again, missed = await open_reader(hub, after=seen)
        hub.publish("run", {}, "a")
        return missed, await anext(again)

    missed, then = asyncio.run(read())
    assert numbers(missed) == [2]
    assert numbers(then) == [3]


def test_a_reader_with_another_servers_event_id_gets_a_reset() -> None:
    async def read() -> bytes | None:
        hub = Hub()
        hub.open()
        return (await open_reader(hub, after="0badc0de-7"))[1]

    assert (asyncio.run(read()) or b"").startswith(b"event: reset\n")


def test_a_reader_that_is_too_slow_gets_a_reset_and_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    monkeypatch.setattr(module, "GATHER_S", 0.0)

    async def read() -> list[bytes | None]:
        hub = Hub()
        hub.open()
        reader, _ = await open_reader(hub)
        # Its queue fills only once it waits.
        waiting = asyncio.ensure_future(anext(reader))
        hub.publish("run", {"n": 0}, "a")
        heard = [await waiting]
        for number in range(1, 4):
            hub.publish("run", {"n": number}, "a")
            await asyncio.sleep(0.05)
        heard.append(await anext(reader))
        hub.publish("run", {"n": 4}, "a")
        return [*heard, await anext(reader)]

    first, reset_message, then = asyncio.run(read())
    assert numbers(first) == [1]
    assert reset_message is not None
    assert reset_message.startswith(b"event: reset\n")
    assert numbers(reset_message) == [4]
    assert numbers(then) == [5]


def test_close_delivers_pending_events_and_ends_the_streams() -> None:
    async def read() -> list[bytes | None]:
        hub = Hub()
        hub.open()
        reader, _ = await open_reader(hub)
        hub.publish("run", {}, "a")
        hub.close()
        return [text async for text in reader]

    assert [numbers(text) for text in asyncio.run(read())] == [[1]]


def test_a_reader_of_a_quiet_run_is_pinged_while_other_runs_publish() -> None:
    async def read() -> bytes | None:
        hub = Hub()
        hub.open()
        reader = hub.read(None, "a", idle_s=0.3)
        await anext(reader)

        async def publish_others() -> None:
            while True:
                hub.publish("beat", {}, "b")
                await asyncio.sleep(0.02)

        others = asyncio.create_task(publish_others())
        try:
            return await asyncio.wait_for(anext(reader), IDLE_S)
        finally:
            others.cancel()

    assert asyncio.run(read()) is None
