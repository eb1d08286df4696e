"""Sends metrics to a tracker on a separate thread, so that no step waits for a service."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.bounds import Count
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.journal_follow import JournalPlace, follow
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import Document, RunRecord, read_document, write_document
from holdfast.contracts.records.history import load_events
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker

# How far a tracker has the metrics of the program, for the next launch.
#
# After a crash, a launch repeats the steps since its checkpoint. Most trackers append, so their
# curves would have these steps twice.

# A fixed width, so that a number always replaces all of the last one.
DIGITS: Final = 20
NONE: Final = -1


class LoggedStep:
    """The newest step whose metrics a tracker of a run got, in a file of the run."""

    def __init__(self, run: RunPaths, tracker: str) -> None:
        """Read what an earlier launch recorded. `newest` is `NONE` without a usable file."""
        self._path = run.deliveries / f"tracker-{tracker}.step"
        self._handle: int | None = None
        self.newest = NONE
        with contextlib.suppress(OSError, ValueError):
            self.newest = int(reading.read_bounded(self._path, DIGITS + 1))

    def record(self, step: int) -> None:
        """Record that the tracker has the metrics of `step`. Raises `OSError`.

        The line outlives this process. It may be lost with the node: the steps then come twice.
        """
        if self._handle is None:
            durable.make_directory(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, 0o644)
        os.pwrite(self._handle, f"{step:0{DIGITS}d}\n".encode(), 0)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


QUEUE_MAX: Final = 100_000
# A job that ends must not wait long for a service that does not answer.
CLOSE_TIMEOUT_S: Final = 20.0
# Between two looks for metrics that were reported for checkpoints.
LOOK_S: Final = 10.0

_Item = tuple[int, Mapping[str, float]]
_Send = Callable[[int, Mapping[str, float]], None]
Number = tuple[Count, Count]


class TrackerPlace(Document):
    """How far a tracker has the reported metrics: the last `opening` and `sequence` by journal."""

    format: Count = 1
    last: dict[str, Number] = Field(default_factory=dict)


class ReportedMetrics:
    """The metrics that were reported since a tracker last got some, by the journals of a run."""

    def __init__(self, run: RunPaths, tracker: str) -> None:
        self._run = run
        self._file = run.deliveries / f"tracker-{tracker}.json"
        self._last: dict[str, Number] | None = None
        self._places: dict[Path, JournalPlace | None] = {}

    def take(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step of the checkpoint, values) of what is new, in the order of each journal.

        Raises `OSError` and `HoldfastError` for a file that cannot be read.
        """
        if self._last is None:
            known = read_document(TrackerPlace, self._file)
            self._last = dict(known.last) if known else {}
        found: list[Event] = []

        def take(event: Event) -> None:
            if event.kind is EventKind.METRIC:
                found.append(event)

        places = {
            path: follow(path, self._places.get(path), begin=lambda: None, take=take)
            for path, _ in self._run.list_journals_of(())
        }
        self._places = places
        taken = []
        for event in found:
            number = (event.opening, event.sequence)
            # A journal is read again from its start if it was replaced.
            if number > self._last.get(event.writer, (0, 0)):
                self._last[event.writer] = number
                step = event.data.get("step") or 0
                taken.append((step, {event.data["metric"]: float(event.data["value"])}))
        return taken

    def keep(self) -> None:
        """Record that the tracker has all that was taken. Without it, the next launch repeats it.

        Raises `OSError` if it cannot be written.
        """
        durable.make_directory(self._file.parent)
        write_document(self._file, TrackerPlace(last=self._last or {}))


class TrackerSink:
    """Passes the metrics of one launch to an open tracker, in order.

    It also passes on what evaluations report for the run's checkpoints meanwhile. Steps that a
    tracker has kept from an earlier launch are left out.
    """

    def __init__(self, tracker: Tracker, reported: ReportedMetrics, logged: LoggedStep) -> None:
        self._tracker, self._reported, self._logged = tracker, reported, logged
        skips = tracker.keeps_at_once and not tracker.has_dropped_later
        self._has_until = logged.newest if skips else NONE
        self._has_said = self._cannot_record = False
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_MAX)
        self._is_orderly = False
        self._dropped = 0
        self._has_reported = self._has_missed = False
        self._thread = threading.Thread(
            target=self._work, name=f"holdfast-{tracker.name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of a step. If the queue is full, drop and count them."""
        try:
            self._queue.put_nowait((step, {name: float(one) for name, one in values.items()}))
        except queue.Full:
            self._dropped += 1

    def close(self, *, is_orderly: bool) -> None:
        """Send what is queued and close the tracker, for `CLOSE_TIMEOUT_S` at most."""
        self._is_orderly = is_orderly
        if self._dropped:
            self._report(f"dropped {counted(self._dropped, 'line')} of metrics")
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._report(f"it did not take all metrics within {CLOSE_TIMEOUT_S:.0f} s")

    def _work(self) -> None:
        look_at = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                self._pass_on_reported()
                look_at = time.monotonic() + LOOK_S
                continue
            if item is None:
                break
            self._log_own(*item)
        self._pass_on_reported()
        self._logged.close()
        try:
            self._tracker.close(is_orderly=self._is_orderly)
        # As above.
        except Exception as error:
            self._report(f"it could not be closed: {error!r}")

    def _log_own(self, step: int, values: Mapping[str, float]) -> None:
        """Send metrics of the program, unless the tracker has those of this step already."""
        if step <= self._has_until:
            if not self._has_said:
                self._report(
                    f"it has the metrics until step {self._has_until} from an earlier launch, so "
                    f"those of steps {step} to {self._has_until} are not sent again"
                )
            self._has_said = True
            return
        if not self._log(self._tracker.log, step, values) or not self._tracker.keeps_at_once:
            return
        try:
            self._logged.record(step)
        except OSError as error:
            if not self._cannot_record:
                self._report(f"repeated steps may come twice after a crash: {error}")
            self._cannot_record = True

    def _log(self, send: _Send, step: int, values: Mapping[str, float]) -> bool:
        try:
            send(step, values)
        # A tracker's library can raise anything, and training continues without it.
        except Exception as error:
            if not self._has_reported:
                self._report(f"metrics of step {step} are missing: {error!r}")
            self._has_reported = True
            return False
        return True

    def _pass_on_reported(self) -> None:
        """Send the metrics that were reported for checkpoints, at the steps of these."""
        try:
            found = self._reported.take()
            for step, values in found:
                self._log(self._tracker.log_reported, step, values)
            if found:
                self._reported.keep()
        except (OSError, HoldfastError) as error:
            if not self._has_missed:
                self._report(f"reported metrics of checkpoints may be missing: {error}")
            self._has_missed = True

    def _report(self, problem: str) -> None:
        report(f"holdfast: {self._tracker.name}: {problem}", is_error=True)


def open_sink(
    tracker: Tracker, context: RankContext, recorder: Recorder, *, step: int
) -> TrackerSink | None:
    """Open the tracker for this launch and journal its id. Return None if it cannot be opened."""
    try:
        facts: dict[str, Any] = {
            "tracker_id": tracker.open(describe_run(context, tracker.name, step))
        }
        facts |= {"url": url} if (url := tracker.url) else {}
    # A tracker's library can raise anything, and training continues without it.
    except Exception as error:
        text = f"{tracker.name} could not be opened, so it gets no metrics: {error!r}"
        report(f"holdfast: {text}", is_error=True)
        recorder.event(EventKind.NOTE, text=text)
        return None
    recorder.event(EventKind.TRACKED, tracker=tracker.name, **facts)
    logged = LoggedStep(context.run, tracker.name)
    return TrackerSink(tracker, ReportedMetrics(context.run, tracker.name), logged)


def describe_run(context: RankContext, tracker: str, step: int) -> TrackedRun:
    """Return what the tracker of this name must know. Reads the run's journals."""
    identity = context.identity
    record = read_document(RunRecord, context.run.spec)
    origin = record.forked_path if record is not None else None
    return TrackedRun(
        uid=identity.run_uid,
        name=context.run.name,
        directory=context.run.directory,
        attempt=identity.attempt,
        launch=identity.launch,
        world_size=identity.world_size,
        step=step,
        known_id=recorded_id(context.run, tracker),
        forked_from=record.forked_from if record is not None else None,
        parent_id=_parent_id(Path(origin), tracker) if origin else None,
    )


def recorded_id(run: RunPaths, tracker: str) -> str | None:
    """Return the id that the newest launch with this tracker journaled, or None."""
    ids = [
        str(event.data["tracker_id"])
        for event in load_events(run)
        if event.kind is EventKind.TRACKED and event.data.get("tracker") == tracker
    ]
    return ids[-1] if ids else None


def _parent_id(checkpoint: Path, tracker: str) -> str | None:
    """Return the tracker's id of the run of `checkpoint`, if its journals can be read."""
    try:
        return recorded_id(RunPaths(checkpoint.parent.parent), tracker)
    except (OSError, HoldfastError):
        return None
