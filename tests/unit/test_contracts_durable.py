"""Durable files: a reader sees the old bytes or the new, and one process alone creates a name."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from holdfast.contracts.disk import durable
from holdfast.contracts.disk.durable import create_bytes, make_directory, to_json, write_bytes
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.documents import (
    Claim,
    create_document,
    read_document,
    write_document,
)

JOIN_S = 60.0
FORK = multiprocessing.get_context("fork")


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_write_bytes_replaces_the_whole_file_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    write_bytes(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file"]


def test_a_failed_fsync_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    with pytest.raises(OSError, match="No space left"):
        create_bytes(tmp_path / "other", b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_the_name_appears_only_after_the_bytes_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def spy(name: str) -> None:
        def call(*arguments: object) -> object:
            order.append(name)
            return real[name](*arguments)

        monkeypatch.setattr(os, name, call)

    for name in real:
        spy(name)
    write_bytes(tmp_path / "a", b"1")
    create_bytes(tmp_path / "b", b"1")
    assert order == ["fsync", "replace", "fsync", "fsync", "link", "fsync"]


def rewrite_endlessly(path: Path) -> None:
    for number in range(1_000_000):
        write_bytes(path, bytes([number % 251]) * 200_000)


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"\0" * 200_000)
    chance = random.Random(3)
    for _ in range(8):
        process = FORK.Process(target=rewrite_endlessly, args=(path,))
        process.start()
        time.sleep(0.02 + chance.random() * 0.05)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(JOIN_S)
        content = path.read_bytes()
        assert len(content) == 200_000
        assert content == content[:1] * 200_000
    assert all(name == "file" or name.startswith(".file.") for name in names(tmp_path))


def race_for(path: Path, number: int, barrier: Barrier) -> None:
    barrier.wait(JOIN_S)
    won = create_bytes(path, str(number).encode() * 50_000)
    os._exit(0 if won else 1)


@pytest.mark.more
def test_one_of_eight_processes_creates_the_file(tmp_path: Path) -> None:
    for round_number in range(3):
        path = tmp_path / f"claim{round_number}"
        barrier = FORK.Barrier(8)
        racers = [FORK.Process(target=race_for, args=(path, n, barrier)) for n in range(8)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(JOIN_S)
        assert None not in {racer.exitcode for racer in racers}
        won = [number for number, racer in enumerate(racers) if racer.exitcode == 0]
        assert sorted(racer.exitcode or 0 for racer in racers) == [0] + [1] * 7
        assert path.read_bytes() == str(won[0]).encode() * 50_000
    assert names(tmp_path) == ["claim0", "claim1", "claim2"]


def test_make_directory_syncs_the_parents_of_missing_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_directory", synced.append)
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path, tmp_path / "a"]


CLAIM = Claim(job_id="7", pid=1, process_start_s=2.5, boot_id="b", host="h", claimed_at=3.0)


def test_a_document_is_read_back_and_created_once(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    assert read_document(Claim, path) is None
    assert create_document(path, CLAIM) is True
    assert create_document(path, CLAIM.model_copy(update={"job_id": "8"})) is False
    assert read_document(Claim, path) == CLAIM
    write_document(path, CLAIM.model_copy(update={"job_id": "9"}))
    again = read_document(Claim, path)
    assert again is not None
    assert again.job_id == "9"
    assert read_document(Claim, path / "below a file") is None


def test_a_document_with_unknown_keys_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    path.write_bytes(to_json(CLAIM.model_dump() | {"mood": "calm"}))
    assert read_document(Claim, path) == CLAIM
    path.write_bytes(b'{"job_id": "7"')
    with pytest.raises(HoldfastError, match="not a valid Claim"):
        read_document(Claim, path)


def test_a_temporary_name_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.warns(UserWarning, match="Input/output error"):
            create_bytes(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
