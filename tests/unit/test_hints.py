"""How a flusher waits for other nodes: until a hint of its agent, or by looking again and again."""

from __future__ import annotations

import os
import threading
import time

import pytest

from holdfast.trainer.flusher import hints
from holdfast.trainer.flusher.hints import Hints


def wait_of(made: Hints, waited_s: float = 5.0) -> float:
    """Return how long a wait takes."""
    began = time.monotonic()
    made.wait(waited_s)
    return time.monotonic() - began


@pytest.fixture
def handle() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def test_a_hint_ends_a_wait_and_one_before_it_counts(handle: int) -> None:
    made = Hints(handle)
    threading.Timer(0.2, lambda: os.eventfd_write(handle, 1)).start()
    assert 0.1 < wait_of(made) < hints.LOOK_S / 2
    made.give()
    made.give()
    assert wait_of(made) < 0.1


def test_without_a_hint_the_folder_is_looked_at_now_and_then(
    handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "LOOK_S", 0.6)
    made = Hints(handle)
    assert wait_of(made) >= 0.5
    made.hurry(True)
    assert wait_of(made) < 0.1, "the change itself is a hint"
    assert wait_of(made) < 0.5


def test_without_an_agent_the_folder_is_looked_at_often(handle: int) -> None:
    assert wait_of(Hints(), 0.0) < 0.05
    assert wait_of(Hints(), 5.0) < 0.5
    made = Hints(handle)
    made.end()
    assert wait_of(made) < 0.5
