"""Sends metrics to a tracker on a separate thread, so that no step waits for a service."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.contracts.records.history import load_events
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker

QUEUE_MAX: Final = 100_000
# A job that ends must not wait long for a service that does not answer.
CLOSE_TIMEOUT_S: Final = 20.0

_Item = tuple[int, Mapping[str, float]]


class TrackerSink:
    """Passes the metrics of one launch to an open tracker, in order."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_MAX)
        self._is_orderly = False
        self._dropped = 0
        self._has_reported = False
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
        while (item := self._queue.get()) is not None:
            try:
                self._tracker.log(*item)
            # A tracker's library can raise anything, and training continues without it.
            except Exception as error:
                if not self._has_reported:
                    self._report(f"metrics of step {item[0]} are missing: {error!r}")
                self._has_reported = True
        try:
            self._tracker.close(is_orderly=self._is_orderly)
        # As above.
        except Exception as error:
            self._report(f"it could not be closed: {error!r}")

    def _report(self, problem: str) -> None:
        report(f"holdfast: {self._tracker.name}: {problem}", is_error=True)


def open_sink(
    tracker: Tracker, context: RankContext, recorder: Recorder, *, step: int
) -> TrackerSink | None:
    """Open the tracker for this launch and journal its id. Return None if it cannot be opened."""
    try:
        found = tracker.open(describe_run(context, tracker.name, step))
    # A tracker's library can raise anything, and training continues without it.
    except Exception as error:
        text = f"{tracker.name} could not be opened, so it gets no metrics: {error!r}"
        report(f"holdfast: {text}", is_error=True)
        recorder.event(EventKind.NOTE, text=text)
        return None
    recorder.event(EventKind.TRACKED, tracker=tracker.name, tracker_id=found)
    return TrackerSink(tracker)


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
