"""Faults of what a run stands on: its disk, its index, its Prefect server, its cloud, its files.

Each acts on files and servers of the testbed alone, and gives back what it took.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.errors import ServiceError
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.paths import CheckpointName
from holdfast.flows.drills.fault_context import FaultContext
from holdfast.flows.drills.target_run import TargetRun
from holdfast.lineage.heal import MAGIC, quarantine

PREFECT_GAP_STEPS: Final = 50
DATABASE_BACK_S: Final = 120.0
# What a full disk leaves for journals and logs: no checkpoint of a stand fits in it.
LEFT_BYTES: Final = 1 << 20
SAVE_FAILS_S: Final = 180.0


def fill_disk(context: FaultContext) -> str:
    """Fill the root until a save has failed, then give the room back.

    What the keep rules let go meanwhile is filled, too: a save might go on for ever in its room.
    """
    root, target = context.need_testbed().root, context.target
    filler, since = root / ".filler", time.time()

    def failed_saves() -> list[Event]:
        with open(filler, "ab") as stream, contextlib.suppress(OSError):
            stream.write(bytes(max(0, _free_bytes(root) - LEFT_BYTES)))
        return target.events_of(EventKind.SAVE_FAILED, since)

    try:
        failed = target.wait_for("a save that fails", failed_saves, SAVE_FAILS_S)
    finally:
        filler.unlink(missing_ok=True)
    return f"a full disk: {str(failed[0].data.get('error'))[:120]}"


def take_database(context: FaultContext) -> str:
    """Overwrite the index; who opens it next sets it aside, and its flow fills a new one.

    Written over in place and not cut short: who has these files in memory may still read them.
    """
    home = context.need_testbed().home
    index = home / "holdfast.db"
    overwritten = 0
    for path in (index, home / "holdfast.db-wal"):
        if path.is_file():
            _overwrite(path)
            overwritten += 1
    # As the next one to open it does; the flow reads its own pages from memory.
    aside = quarantine(index)
    if aside is None:
        raise ServiceError(f"{index} was overwritten, and taken for an index")
    context.target.wait_for("the flow's new index", index.is_file, DATABASE_BACK_S)
    for path in home.glob(f"{aside.name}*"):
        path.unlink(missing_ok=True)
    return f"{overwritten} files of the index overwritten; they were set aside"


def _overwrite(path: Path) -> None:
    """Leave only the words that a SQLite file begins with."""
    with open(path, "r+b") as stream:
        stream.seek(len(MAGIC))
        stream.write(b"not a database " * (max(0, path.stat().st_size - len(MAGIC)) // 15))


def corrupt_checkpoint(context: FaultContext) -> str:
    """Flip a byte of the newest checkpoint while nothing runs; put it back after the resume."""
    target = context.target
    flow, attempt = target.flow(), target.attempt
    if flow is None:
        raise ServiceError(f"{target.paths.name}: no flow that supervises it lives here")
    with _suspended(flow):
        target.agent().send_signal(signal.SIGTERM)
        target.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        name, path = _newest_file(target)
        at = context.chance.randrange(path.stat().st_size)
        _flip(path, at)
    try:
        since = time.time()
        resumed = target.wait_for("a resume", lambda: target.events_of(EventKind.RESUMED, since))
    finally:
        _flip(path, at)
    if not any(str(line).startswith(name) for line in resumed[0].data.get("skipped", ())):
        raise ServiceError(f"{name} was damaged and believed: {resumed[0].data}")
    return f"byte {at} of {name}/{path.name} flipped; the resume passed it over"


def announce_preemption(context: FaultContext) -> str:
    """A notice is served until the agent has heard it."""
    cloud, target, since = context.need_testbed().cloud, context.target, time.time()
    cloud.preempt()
    try:
        heard = target.wait_for(
            "the agent's word of the notice", lambda: target.events_of(EventKind.SIGNAL, since)
        )
    finally:
        cloud.calm()
    return f"heard as {heard[0].data.get('source')}: {heard[0].data.get('detail')}"


def take_prefect(context: FaultContext) -> str:
    """The run gets a flow under a real server; the server is killed, and started again later.

    Then it gets its former flow again, without a server around it.
    """
    testbed, target = context.need_testbed(), context.target
    testbed.prefect.start()
    _change_flow(context, with_prefect=True)
    testbed.prefect.kill()
    _await_steps(target, "training without a Prefect server")
    testbed.prefect.start()
    _await_steps(target, "training with a Prefect server")
    survived = target.flow() is not None
    _change_flow(context, with_prefect=False)
    return f"SIGKILL to the Prefect server; its flow {'lived on' if survived else 'ended'}"


def _await_steps(target: TargetRun, what: str) -> None:
    """Wait until some more steps were trained."""
    step = target.newest.step if target.newest else 0
    target.wait_for(what, lambda: target.newest and target.newest.step >= step + PREFECT_GAP_STEPS)


def _change_flow(context: FaultContext, *, with_prefect: bool) -> None:
    """Another flow instead of the one that supervises, if one does."""
    testbed, target, since = context.need_testbed(), context.target, time.time()
    testbed.kill_flow()
    testbed.start_flow(target.paths, with_prefect=with_prefect)
    target.wait_for("another flow", lambda: target.events_of(EventKind.SUPERVISED, since))


@contextlib.contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def _newest_file(target: TargetRun) -> tuple[str, Path]:
    """The newest committed checkpoint's name, and its largest file."""
    for directory in reversed(target.paths.list_checkpoints()):
        manifest = read_manifest(directory)
        if manifest is not None and CheckpointName.parse(directory.name):
            largest = max(manifest.files, key=lambda entry: entry.bytes)
            return directory.name, directory / largest.path
    raise ServiceError(f"{target.paths.name} has no committed checkpoint")


def _flip(path: Path, at: int) -> None:
    """Turn every bit of one byte; twice is none."""
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 0xFF]))
        stream.flush()
        os.fsync(stream.fileno())


def _free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize
