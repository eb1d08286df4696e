"""Faults of a run's disk, index, Prefect server, cloud and files.

Each one acts on files and servers of the testbed only, and restores them.
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
# Space for journals and logs on the full disk. No checkpoint of a testbed fits in it.
LEFT_BYTES: Final = 1 << 20
SAVE_FAILS_S: Final = 180.0


def fill_disk(context: FaultContext) -> str:
    """Fill the root until a save has failed, then free the space.

    Space that the keep rules free meanwhile is filled too, so that no save can use it.
    """
    root, target = context.need_testbed().root, context.target
    filler, since = root / ".filler", time.time()

    def failed_saves() -> list[Event]:
        with open(filler, "ab") as stream, contextlib.suppress(OSError):
            stream.write(bytes(max(0, _free_bytes(root) - LEFT_BYTES)))
        return target.events_of(EventKind.SAVE_FAILED, since)

    try:
        failed = target.wait_for("a failed save", failed_saves, SAVE_FAILS_S)
    finally:
        filler.unlink(missing_ok=True)
    return f"a full disk: {str(failed[0].data.get('error'))[:120]}"


def take_database(context: FaultContext) -> str:
    """Overwrite the index. It is then set aside, and the supervisor fills a new one.

    The files are overwritten in place and not truncated, because other processes have them mapped.
    """
    home = context.need_testbed().home
    index = home / "holdfast.db"
    overwritten = 0
    for path in (index, home / "holdfast.db-wal"):
        if path.is_file():
            _overwrite(path)
            overwritten += 1
    # Any process that opens the index does this. The supervisor still has its pages in memory.
    aside = quarantine(index)
    if aside is None:
        raise ServiceError(f"{index} was overwritten, but still accepted as an index")
    context.target.wait_for("the supervisor's new index", index.is_file, DATABASE_BACK_S)
    for path in home.glob(f"{aside.name}*"):
        path.unlink(missing_ok=True)
    return f"{overwritten} files of the index overwritten, then set aside"


def _overwrite(path: Path) -> None:
    """Overwrite a SQLite file, except for its header string."""
    with open(path, "r+b") as stream:
        stream.seek(len(MAGIC))
        stream.write(b"not a database " * (max(0, path.stat().st_size - len(MAGIC)) // 15))


def corrupt_checkpoint(context: FaultContext) -> str:
    """Flip a byte of the newest checkpoint between two attempts; restore it after the resume."""
    target = context.target
    flow, attempt = target.flow(), target.attempt
    if flow is None:
        raise ServiceError(f"{target.paths.name}: its supervisor is not a process of this machine")
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
        raise ServiceError(f"{name} was damaged but not skipped: {resumed[0].data}")
    return f"byte {at} of {name}/{path.name} flipped; the resume skipped the checkpoint"


def announce_preemption(context: FaultContext) -> str:
    """Announce a preemption until the agent has received it."""
    cloud, target, since = context.need_testbed().cloud, context.target, time.time()
    cloud.preempt()
    try:
        heard = target.wait_for(
            "the agent's report of the notice", lambda: target.events_of(EventKind.SIGNAL, since)
        )
    finally:
        cloud.calm()
    return f"received as {heard[0].data.get('source')}: {heard[0].data.get('detail')}"


def take_prefect(context: FaultContext) -> str:
    """Run the flow with a real Prefect server, kill the server, and restart it later.

    The supervisor without Prefect then takes over again.
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
    return f"SIGKILL to the Prefect server; its flow {'continued' if survived else 'ended'}"


def _await_steps(target: TargetRun, what: str) -> None:
    """Wait until some more steps were trained."""
    step = target.newest.step if target.newest else 0
    target.wait_for(what, lambda: target.newest and target.newest.step >= step + PREFECT_GAP_STEPS)


def _change_flow(context: FaultContext, *, with_prefect: bool) -> None:
    """Replace the run's supervisor, if it has one."""
    testbed, target, since = context.need_testbed(), context.target, time.time()
    testbed.kill_flow()
    testbed.start_flow(target.paths, with_prefect=with_prefect)
    target.wait_for("a new supervisor", lambda: target.events_of(EventKind.SUPERVISED, since))


@contextlib.contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def _newest_file(target: TargetRun) -> tuple[str, Path]:
    """Return the newest committed checkpoint's name and its largest file."""
    for directory in reversed(target.paths.list_checkpoints()):
        manifest = read_manifest(directory)
        if manifest is not None and CheckpointName.parse(directory.name):
            largest = max(manifest.files, key=lambda entry: entry.bytes)
            return directory.name, directory / largest.path
    raise ServiceError(f"{target.paths.name} has no committed checkpoint")


def _flip(path: Path, at: int) -> None:
    """Invert every bit of one byte. A second call restores it."""
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
