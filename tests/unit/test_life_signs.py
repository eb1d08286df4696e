"""When a live run counts as without a supervisor, and its agent as silent."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.api.signs import PROBE_S, LifeSigns
from holdfast.contracts.disk.file_locks import open_lock

EVERY_S = 2.0


def heard(at: float = 0.0) -> LifeSigns:
    """The signs of a run whose agent wrote a heartbeat at `at`."""
    signs = LifeSigns()
    assert signs.hear(1, ("first",), at)
    signs.every_s = EVERY_S
    return signs


def wait(signs: LifeSigns, begin: float, seconds: float, step_s: float = 0.5) -> float:
    """Look every `step_s` without a new heartbeat; returns the time at the end."""
    for turn in range(1, int(seconds / step_s) + 1):
        assert not signs.hear(1, ("first",), begin + turn * step_s)
    return begin + int(seconds / step_s) * step_s


def test_an_agent_is_late_after_a_heartbeat_and_silent_after_three() -> None:
    signs = heard()
    now = wait(signs, 0.0, 3.0)
    assert (signs.is_late, signs.is_silent) == (False, False)
    now = wait(signs, now, 4.0)
    assert (signs.is_late, signs.is_silent) == (True, False)
    wait(signs, now, 0.5)
    assert signs.is_silent
    assert signs.hear(1, ("second",), 8.0)
    assert (signs.silent_s, signs.is_silent) == (0.0, False)


def test_a_server_that_was_suspended_hears_an_agent_before_it_judges() -> None:
    signs = heard()
    # The last look before was just before a heartbeat, and the agent was suspended too.
    now = wait(signs, 0.0, 1.5)
    assert not signs.hear(1, ("first",), now + 3600)
    wait(signs, now + 3600, EVERY_S)
    assert not signs.is_silent


def test_the_next_attempt_has_not_begun_to_write() -> None:
    signs = heard()
    now = wait(signs, 0.0, 20.0)
    assert signs.is_silent
    signs.hear(2, (), now)
    for turn in range(40):
        signs.hear(2, (), now + turn)
    assert not signs.is_silent


def test_a_lock_must_be_free_in_two_rounds(tmp_path: Path) -> None:
    lock = tmp_path / "flow.lock"
    handle = open_lock(lock, owner_only=True)
    fcntl.flock(handle, fcntl.LOCK_EX)
    signs = LifeSigns()
    signs.probe(lock, 1.0)
    assert not signs.is_unsupervised
    assert signs.supervised_at is not None
    os.close(handle)
    # Not yet due.
    signs.probe(lock, 1.0 + PROBE_S / 2)
    signs.probe(lock, 1.0 + PROBE_S)
    assert not signs.is_unsupervised
    signs.probe(lock, 1.5 + PROBE_S)
    assert signs.is_unsupervised
    handle = open_lock(lock, owner_only=True)
    fcntl.flock(handle, fcntl.LOCK_EX)
    signs.probe(lock, 2.5 + 2 * PROBE_S)
    assert not signs.is_unsupervised
    os.close(handle)
