"""Journal lines and metrics of rank 0, written by a background thread.

A journal line is durable when it is written, which takes as long as the storage takes. No training
step waits for it. Metrics are buffered and written about once a second.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.contracts.disk import durable, filesystems, reading
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import folder_of
from holdfast.contracts.errors import HoldfastError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.trainer.ranks.rank_context import RankContext

# Metrics that the spec names: reports one that the program does not log.
#
# The name refers to something that only the program knows, so it cannot be checked at submission.
# A misspelt one would switch off the detection of bad losses, or leave `checkpoint.keep.best`
# without anything to compare.

KEEP_BEST: Final = "checkpoint.keep.best"
NUMERICS: Final = "supervision.numerics.metric"
BEST: Final = "Session(best=…)"
NAMES_MAX: Final = 8
# What does not happen until the program logs the metric.
_UNTIL: Final = {
    KEEP_BEST: "Until then, no checkpoint is deleted",
    NUMERICS: "Until then, bad losses are noticed only on other ranks that log or observe it",
    BEST: "Until then, session.best is empty",
}


class _Journal(Protocol):
    def __call__(self, kind: EventKind, **data: Any) -> None: ...


def named_metrics(record: RunRecord | None) -> dict[str, str]:
    """Return the metrics that the person named in the run's spec, by key.

    A person who set `supervision.numerics` relies on its metric even if it is the default one.
    """
    given = record.given if record is not None else None
    if record is None or given is None:
        return {}
    spec, found = RunSpec.read(record.spec), {}
    if spec.checkpoint.keep.best is not None:
        found[KEEP_BEST] = spec.checkpoint.keep.best.metric
    if given.get("supervision", {}).get("numerics"):
        found[NUMERICS] = spec.supervision.numerics.metric
    return found


class MetricWatch:
    """Knows which of the `wanted` metrics the program has logged in this launch or before.

    A step may have several lines. So a metric is missing when the next step is logged, a checkpoint
    is saved or the program ends without it. `wanted` has those that were not logged yet, by key.
    """

    def __init__(self, wanted: Mapping[str, str], journal: _Journal) -> None:
        self._journal = journal
        self.wanted = dict(wanted)
        self._missing: set[str] = set()
        self._logged: dict[str, None] = {}
        self._step: int | None = None

    def want(self, key: str, metric: str) -> None:
        """Watch another metric, which the program itself names."""
        self.wanted[key] = metric

    def look(self, step: int, names: Iterable[str]) -> None:
        """Take the names of one logged line."""
        if not self.wanted:
            return
        if self._step is not None and step != self._step:
            self.look_back()
        self._step = step
        self._logged.update(dict.fromkeys(names))
        self.meet(names)

    def meet(self, names: Iterable[str]) -> None:
        """Take the names of metrics that the program has given, now or before a resume."""
        known = {*names}
        for key, metric in list(self.wanted.items()):
            if metric in known:
                del self.wanted[key]
                if key in self._missing:
                    self._write(key, metric, f"the program logs {metric!r} now", is_missing=False)

    def look_back(self) -> None:
        """Report, once, every metric that has not been logged."""
        for key, metric in self.wanted.items():
            if key in self._missing:
                continue
            self._missing.add(key)
            near = difflib.get_close_matches(metric, self._logged, n=1)
            logged = ", ".join(list(self._logged)[:NAMES_MAX]) or "nothing"
            text = (
                f"{key} names the metric {metric!r}, which rank 0 has not logged yet. It logs "
                f"{logged}{f'; did you mean {near[0]}?' if near else '.'} {_UNTIL[key]}"
            )
            self._write(key, metric, text, is_missing=True)

    def _write(self, key: str, metric: str, text: str, *, is_missing: bool) -> None:
        report(f"holdfast: {text}", is_error=is_missing)
        self._journal(
            EventKind.METRIC_MISSING, key=key, metric=metric, missing=is_missing, text=text
        )


FLUSH_S: Final = 1.0
# The metrics that a checkpoint records, as JSON. They must fit into its staging slot's table.
CHECKPOINT_BYTES_MAX: Final = 256 * 1024
QUEUE_MAX: Final = 100_000
CLOSE_TIMEOUT_S: Final = 30.0
# A slow storage must not delay a resume by more.
JOURNAL_WAIT_S: Final = 5.0
# The names of a line that are not metrics.
RESERVED: Final = ("step", "time")
NOTHING: Final[Mapping[str, str]] = {}

_More = Callable[[], dict[str, Any]]
_Item = tuple[EventKind | None, dict[str, Any], _More | None]


class Recorder:
    """Queues journal events and metric lines, and writes them in order."""

    def __init__(
        self, journal: Path, metrics: Path, named: Mapping[str, str] = NOTHING, **facts: Any
    ) -> None:
        """Open `journal` now. `metrics` is created with its first line.

        `named` are the metrics that the spec names, by key. `facts` are part of every journal line
        about training.
        """
        self._facts = facts
        self.watch = MetricWatch(named, self.event)
        self._journal = JournalWriter(journal)
        self._metrics = metrics
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_MAX)
        self._dropped = 0
        self._has_reported = False
        self._stream: FileIO | None = None
        self.latest: dict[str, float] = {}
        self._thread = threading.Thread(target=self._work, name="holdfast-recorder", daemon=True)
        self._thread.start()

    def event(self, kind: EventKind, more: _More | None = None, **data: Any) -> None:
        """Queue one journal line. The thread calls `more` for facts that take time to collect."""
        self._queue.put((kind, {**self._facts, **data}, more))

    def flush(self) -> None:
        """Wait until the journal has all lines so far, for `JOURNAL_WAIT_S` at most."""
        is_written = threading.Event()

        def confirm() -> dict[str, Any]:
            is_written.set()
            return {}

        self._queue.put((None, {}, confirm))
        is_written.wait(JOURNAL_WAIT_S)

    def note(self, text: str) -> None:
        """Print and journal what a person should know."""
        report(f"holdfast: {text}")
        self.event(EventKind.NOTE, text=text)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue one line of metrics. If the queue is full, drop and count it."""
        self.latest.update({k: float(v) for k, v in values.items() if math.isfinite(v)})
        self.watch.look(step, values)
        line = {"step": step, "time": time.time(), **{k: _number(v) for k, v in values.items()}}
        try:
            self._queue.put_nowait((None, line, None))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the queued lines, for `CLOSE_TIMEOUT_S` at most, and end the thread."""
        self.watch.look_back()
        if self._dropped:
            text = f"dropped {counted(self._dropped, 'line')} of metrics"
            self._queue.put((EventKind.NOTE, {"text": text}, None))
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._journal.close()

    def _work(self) -> None:
        lines: list[str] = []
        flushed_at = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=FLUSH_S)
            except queue.Empty:
                item = (None, {}, None)
            if item is not None and item[0] is not None:
                self._append(item[0], item[1], item[2])
            elif item is not None and item[1]:
                lines.append(json.dumps(item[1]))
            elif item is not None and item[2] is not None:
                item[2]()
            if lines and (item is None or time.monotonic() - flushed_at >= FLUSH_S):
                self._write(lines)
                lines, flushed_at = [], time.monotonic()
            if item is None:
                self._close_metrics()
                return

    def _append(self, kind: EventKind, data: dict[str, Any], more: _More | None) -> None:
        try:
            self._journal.append(kind, **data, **(more() if more else {}))
        except (OSError, ValueError, TypeError, HoldfastError) as error:
            # A line that JSON cannot have must not end the thread, and with it all further lines.
            self._report_once(f"{self._journal.path}: {error}")

    def _write(self, lines: list[str]) -> None:
        try:
            if self._stream is None:
                durable.make_directory(self._metrics.parent)
                flags = (
                    os.O_WRONLY
                    | os.O_APPEND
                    | os.O_CREAT
                    | filesystems.send_flag(self._metrics.parent)
                )
                handle = reading.open_beneath(self._metrics, flags, below=folder_of(self._metrics))
                self._stream = FileIO(handle, "ab")
            self._stream.write(("\n".join(lines) + "\n").encode())
        except (OSError, HoldfastError) as error:
            self._close_metrics()
            self._report_once(f"{self._metrics}: {error}")

    def _close_metrics(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _report_once(self, problem: str) -> None:
        """Report the first write error only. Training continues without the line."""
        if not self._has_reported:
            report(f"holdfast: cannot write {problem}", is_error=True)
        self._has_reported = True


class NoRecorder(Recorder):
    """The recorder of all ranks except rank 0."""

    def __init__(self) -> None:
        self.latest = {}
        self.watch = MetricWatch(NOTHING, self.event)

    def event(self, kind: EventKind, more: _More | None = None, **data: Any) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Wait for nothing."""

    def note(self, text: str) -> None:
        """Write nothing: rank 0 does."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def open_recorder(context: RankContext) -> Recorder:
    """Return the recorder of this launch on rank 0, and one that writes nothing on others."""
    who = context.identity
    if who.rank != 0:
        return NoRecorder()
    metrics = context.run.metrics_of(who.attempt, who.launch)
    # Without an agent, no spec is in force.
    record = read_document(RunRecord, context.run.spec) if context.has_agent else None
    return Recorder(
        context.attempt.rank_journal,
        metrics,
        named_metrics(record),
        attempt=who.attempt,
        launch=who.launch,
    )


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return logged metrics as numbers.

    Raises `SpecError` for a name in `RESERVED`, and `TypeError` for a value that is not one number.
    """
    for name in RESERVED:
        if name in values:
            raise SpecError(
                f"log({name}={values[name]!r}): each line of metrics has its own {name}, so no "
                f"metric can have this name; log it under another one, such as my_{name}"
            )
    return {name: number_of(value, f"log({name}=...)") for name, value in values.items()}


def number_of(value: Any, given: str) -> float:
    """Return a number, or a tensor or array of one element, as a float.

    True counts as 1 and False as 0. For other values, raises `TypeError` whose text begins with
    `given`.
    """
    if type(value) is float:
        return value
    try:
        # The type of a value that is not a number is reported below.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if not isinstance(value, str | bytes | bytearray):
                return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"{given}: {type(value).__name__}{shape}; expected a number, or a tensor of one element"
    )


def improved(
    best: dict[str, Any], of: tuple[str, str] | None, values: Mapping[str, float], step: int
) -> dict[str, Any]:
    """Return the best value so far of the metric `of`, given as (name, "min" or "max")."""
    if of is None or of[0] not in values:
        return best
    name, better = of
    value, former = float(values[name]), best.get("value")
    if former is None or math.isnan(former):
        is_better = former is None or not math.isnan(value)
    else:
        is_better = value < former if better == "min" else value > former
    if not is_better:
        return best
    return {"metric": name, "mode": better, "value": value, "step": step}


def that_fit(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics that fit into a checkpoint, and the names of the others.

    Short names go first: a value for each layer or expert has a longer name than a value of the
    whole model, which keep rules use.
    """
    sizes = {name: len(json.dumps(name)) + len(repr(value)) + 4 for name, value in metrics.items()}
    if sum(sizes.values()) <= CHECKPOINT_BYTES_MAX:
        return dict(metrics), []
    left, kept = CHECKPOINT_BYTES_MAX, set()
    for name in sorted(sizes, key=lambda name: (len(name), name)):
        left -= sizes[name]
        if left < 0:
            break
        kept.add(name)
    return (
        {name: value for name, value in metrics.items() if name in kept},
        [name for name in metrics if name not in kept],
    )


def _number(value: float) -> float | str:
    """Return a JSON number, or "nan" or "inf" as text, which JSON numbers cannot express."""
    number = float(value)
    return number if math.isfinite(number) else repr(number)
