"""Faults of a run's disk, index, Prefect server, cloud and files.

Each one acts on files and servers of the testbed only, and restores them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.spec.sections import Numerics
from holdfast.lineage.database.heal import MAGIC, quarantine
from holdfast_bench.drills.context import TestbedContext
from holdfast_bench.live_drills import faults
from holdfast_bench.live_drills.kinds import Recovery
from holdfast_bench.live_drills.target_run import TargetRun

PREFECT_GAP_STEPS: Final = 50
DATABASE_BACK_S: Final = 120.0
# Space for journals and logs on the full disk. No checkpoint of a testbed fits in it.
LEFT_BYTES: Final = 1 << 20
SAVE_FAILS_S: Final = 180.0
POISON_S_MAX: Final = 120.0
# The testbed's runs use these defaults, except for the action after such a loss.
POLICY: Final = Numerics()
AFTER_NAN: Final[Mapping[str, Recovery]] = {
    "stop": Recovery.NEW_ATTEMPT,
    "rollback": Recovery.IN_PLACE,
    "skip": Recovery.UNDISTURBED,
}


def fill_disk(context: TestbedContext) -> str:
    """Fill the root until a save has failed, then free the space.

    Space that the keep rules free meanwhile is filled too, so that no save can use it.
    """
    root, target = context.testbed.root, context.target
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


def take_database(context: TestbedContext) -> str:
    """Overwrite the index. It is then set aside, and the supervisor fills a new one.

    The files are overwritten in place and not truncated, because other processes have them mapped.
    """
    home = context.testbed.home
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


def announce_preemption(context: TestbedContext) -> str:
    """Announce a preemption until the agent has received it."""
    cloud, target, since = context.testbed.cloud, context.target, time.time()
    cloud.preempt()
    try:
        heard = target.wait_for(
            "the agent's report of the notice", lambda: target.events_of(EventKind.SIGNAL, since)
        )
    finally:
        cloud.calm()
    return f"received as {heard[0].data.get('source')}: {heard[0].data.get('detail')}"


def take_prefect(context: TestbedContext) -> str:
    """Run the flow with a real Prefect server, kill the server, and restart it later.

    The supervisor without Prefect then takes over again.
    """
    testbed, target = context.testbed, context.target
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


def _change_flow(context: TestbedContext, *, with_prefect: bool) -> None:
    """Replace the run's supervisor, if it has one."""
    testbed, target, since = context.testbed, context.target, time.time()
    testbed.kill_flow()
    testbed.start_flow(target.paths, with_prefect=with_prefect)
    target.wait_for("a new supervisor", lambda: target.events_of(EventKind.SUPERVISED, since))


def _free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def poison_step(context: TestbedContext) -> str:
    """Spoil one step: its loss and the weights after it become NaN.

    For a run that skips data, only the reported loss becomes NaN, and training continues. The
    ranks do not report another loss for a while, so this waits until they would.
    """
    target, testbed = context.target, context.testbed
    before = _numerics(target, 0.0)
    reached = max((int(line.data["step"]) for line in before), default=-POLICY.window)
    target.wait_for(
        "a step far enough after the last spoiled one",
        lambda: target.newest and target.newest.step > reached + POLICY.window,
    )
    since = context.acted_at = time.time()
    what = "loss" if testbed.on_nan == "skip" else "weights"
    context.is_poisoned = what == "weights"
    target.records.spoil_step(what)
    reports = target.wait_for(
        "the ranks' report of a spoiled step", lambda: _numerics(target, since), POISON_S_MAX
    )
    action = str(reports[0].data.get("action"))
    expected = testbed.on_nan if len(before) < POLICY.changes_max else "stop"
    if action != expected:
        raise ServiceError(
            f"expected the action {expected} after a spoiled step, got {action}: {reports[0].data}"
        )
    context.recovery = AFTER_NAN[action]
    return f"NaN in the {what} of one step; action: {action}"


def _numerics(target: TargetRun, since: float) -> list[Event]:
    """Return the reports of NaN losses, without those of spikes."""
    lines = target.events_of(EventKind.NUMERICS, since)
    return [line for line in lines if line.data.get("problem") == "nan"]


FAULTS: Final[Mapping[str, Callable[[TestbedContext], str]]] = {
    **faults.FAULTS,
    "spot-notice": announce_preemption,
    "disk-full": fill_disk,
    "database-down": take_database,
    "prefect-down": take_prefect,
    "nan": poison_step,
}
