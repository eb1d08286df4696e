"""Staging slots: memory that is allocated in the background, and who may use it when."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk import direct
from holdfast.contracts.disk.direct import DirectFile
from holdfast.contracts.node import rank_status
from holdfast.contracts.node.rank_status import Proposal, RankStatusTable, fence
from holdfast.trainer.mirror.store import write_all
from holdfast.trainer.slots import slots
from holdfast.trainer.slots.slots import Slot, SlotState
from holdfast.trainer.staging.allocator import Allocator

ALL_S = 10.0
TABLE = {"step": 7}


def test_allocation_for_a_slot_closed_meanwhile_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    closed, other = Slot(Slot.create(1 << 20)), Slot(Slot.create(1 << 20))
    closed.close()
    allocator = Allocator()
    before = set(threading.enumerate())
    allocator.begin([closed, other], 1 << 20)
    for thread in set(threading.enumerate()) - before:
        thread.join(ALL_S)
    assert raised == []
    assert other.allocated_bytes > 1 << 20
    other.close()


def opened_twice() -> tuple[Slot, Slot]:
    """A slot as its rank and its flusher see it."""
    handle = Slot.create(1 << 16)
    try:
        return Slot(handle), Slot(handle)
    finally:
        os.close(handle)


def seen_at_fences(
    monkeypatch: pytest.MonkeyPatch, module: Any, look: Callable[[], Any], act: Callable[[], Any]
) -> list[Any]:
    """Return what another process sees at each fence while `act` runs."""
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "fence", lambda: seen.append(look()))
        act()
    return seen


def test_a_slot_is_sealed_after_its_bytes_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test plays a processor that makes stores visible at fences only."""
    rank, flusher = opened_twice()

    def look() -> tuple[int, int]:
        return flusher._words[slots._Word.STATE], flusher._words[slots._Word.TABLE_BYTES]

    for seal in (rank.seal, functools.partial(rank.seal, is_snapshot=True)):
        rank.begin(7)
        flusher._words[slots._Word.TABLE_BYTES] = 0
        seen = seen_at_fences(monkeypatch, slots, look, functools.partial(seal, TABLE))
        assert seen == [(SlotState.COPYING, len(b'{"step": 7}'))]
        # The reader fences after it has loaded the state, and before the table.
        assert len(seen_at_fences(monkeypatch, slots, look, lambda: flusher.state)) == 1
    # COPYING is there before any byte of the next step.
    assert seen_at_fences(monkeypatch, slots, look, lambda: rank.begin(8))[-1][0] == 1
    # The flusher has read all bytes before the rank may write the next ones.
    flusher.state = SlotState.FLUSHING
    assert seen_at_fences(monkeypatch, slots, look, lambda: flusher.fail("full")) == [
        (SlotState.FLUSHING, len(b'{"step": 7}'))
    ]
    rank.close()
    flusher.close()


def test_a_proposal_is_published_after_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    table, handle = RankStatusTable.create(1)
    table.propose(1, 10)
    words = table._words

    def look() -> tuple[int, int, int]:
        head = rank_status._Head
        return words[head.STATE], words[head.SERIAL], words[head.STEP]

    # Not the former proposal with the new step, and not the new one with the former step.
    seen = seen_at_fences(monkeypatch, rank_status, look, lambda: table.propose(2, 20))
    assert seen == [(Proposal.NONE, 1, 10), (Proposal.NONE, 2, 20)]
    assert len(seen_at_fences(monkeypatch, rank_status, look, lambda: table.proposal)) == 1
    table.close()
    os.close(handle)


def fence_often() -> None:
    for _ in range(1000):
        fence()


def test_a_fence_neither_waits_nor_keeps_anything() -> None:
    threads = [threading.Thread(target=fence_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ALL_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_file_system_that_writes_nothing_is_an_error(
    is_direct: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`os.write` may return 0. Without an error, the loop around it would not end."""
    handle = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(direct, "begin_direct", lambda _: is_direct)
    output = DirectFile(handle, direct.DIRECT_BYTES_MIN)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    acts: list[Callable[[], None]] = [
        lambda: output.write(memoryview(bytes(8192))),
        lambda: write_all(handle, bytes(8192)),
    ]
    for act in acts:
        with pytest.raises(OSError, match="8192 bytes wrote nothing") as caught:
            act()
        assert caught.value.errno == errno.EIO
    os.close(handle)
