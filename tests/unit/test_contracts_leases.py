"""Leases on checkpoints: they hold while they are renewed, and no longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.contracts.disk import leases
from holdfast.contracts.disk.leases import LEASE_S, readers, reading
from holdfast.contracts.disk.paths import RunPaths, lease_path, list_leases

NAME = "step-00000010.a0001.l01"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = RunPaths(tmp_path / "run").checkpoint(NAME)
    made.mkdir(parents=True)
    return made


def test_a_checkpoint_is_held_while_any_reader_reads_it(directory: Path) -> None:
    other = directory.with_name("step-00000100.a0001.l01")
    other.mkdir()
    with reading(directory) as holds:
        assert holds
        with reading(directory):
            assert len(readers(directory)) == 2
        assert readers(directory)
        assert not readers(other)
        # A listing of checkpoints does not include leases.
        assert RunPaths(directory.parent.parent).list_checkpoints() == [directory, other]
    assert not readers(directory)
    assert {path.name for path in directory.parent.iterdir()} == {NAME, other.name}


def test_a_lease_is_renewed_and_expires_without_renewal(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.01)
    with reading(directory):
        (lease,) = list_leases(directory)
        long_ago = time.time() - 2 * LEASE_S
        os.utime(lease, (long_ago, long_ago))
        give_up = time.monotonic() + 20
        while lease.stat().st_mtime < time.time() - LEASE_S:
            assert time.monotonic() < give_up
            time.sleep(0.005)
        assert readers(directory)
    # A killed reader leaves a lease behind, which is deleted after it expires.
    left = lease_path(directory, "node7-4711-1")
    left.touch()
    assert readers(directory) == ["node7-4711-1"]
    os.utime(left, (long_ago, long_ago))
    assert not readers(directory)
    assert not left.exists()


@pytest.mark.parametrize("ahead_s", [2 * LEASE_S, -2 * LEASE_S])
def test_leases_do_not_depend_on_the_clock_of_the_process_that_deletes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    now, real = time.time(), time.time
    left = lease_path(directory, "node7-4711-1")
    left.touch()
    os.utime(left, (now - 2 * LEASE_S, now - 2 * LEASE_S))
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    with reading(directory):
        assert len(readers(directory)) == 1, "of two leases, one has expired"
        assert not left.exists()
    assert [path.name for path in directory.parent.iterdir()] == [NAME]


def test_reading_continues_when_no_lease_can_be_written(tmp_path: Path) -> None:
    with reading(tmp_path / "gone" / NAME) as holds:
        assert not holds
    with pytest.raises(KeyError), reading(tmp_path / "gone" / NAME):
        raise KeyError("a reader's own errors pass through")
