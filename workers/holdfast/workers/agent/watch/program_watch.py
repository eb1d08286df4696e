"""Node 0's watch of a program that writes its own checkpoints.

A thread looks for the program's checkpoints and records each complete one in the run's folder, with
a manifest. Another thread reads the program's output. Neither touches the program or its files.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import reading
from holdfast.contracts.disk.bounds import STEP_MAX
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import (
    GONE,
    PROGRAM,
    REPLACED,
    Manifest,
    record_source,
    retire_source,
)
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import CheckpointError, ForeignFileError, HoldfastError
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.sections import STEP_GROUP
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.checkpoints import own_checkpoints
from holdfast.workers.checkpoints.own_checkpoints import CheckpointPattern, FileStamp, OwnCheckpoint
from holdfast.workers.nodes.heartbeats import RankBeat

# Progress of a program, read from its output by the pattern of its spec.

READ_BYTES: Final = 1 << 18
POLL_S: Final = 0.5
STOP_WAIT_S: Final = 5.0
STEPS_KEPT: Final = 10_000
# A pattern is searched in lines of at most this length, which bounds its time.
LINE_CHARACTERS_MAX: Final = 2000
# A progress bar overwrites its line, so a carriage return ends one too.
_ENDS: Final = re.compile(rb"[\r\n]")
_GROUPED: Final = str.maketrans("", "", ",_ ")


class OutputProgress:
    """The steps in the lines of a program's output."""

    def __init__(self, pattern: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._pattern, self._clock = re.compile(pattern), clock
        self.first = self.step = NOWHERE
        self.step_s = 0.0
        self.changed_at = clock()
        self._read: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)

    def take(self, line: str) -> None:
        """Look for a step in one line. A step that is older than the newest one is ignored."""
        match = self._pattern.search(line[:LINE_CHARACTERS_MAX])
        text = (match[STEP_GROUP] or "").translate(_GROUPED) if match else ""
        if not (text.isascii() and text.isdecimal()) or int(text) > STEP_MAX:
            return
        step, now = int(text), self._clock()
        if step <= self.step:
            return
        if self.step > NOWHERE:
            self.step_s = (now - self.changed_at) / (step - self.step)
        else:
            self.first = step
        self.step, self.changed_at = step, now
        self._read.append((time.time(), step))

    def step_at(self, moment: float) -> int:
        """Return the newest step that had been read at `moment`, in Unix seconds, or `NOWHERE`."""
        return next((step for read_at, step in reversed(self._read) if read_at <= moment), NOWHERE)


class Tail:
    """Reads the new lines of a growing log. Safe against links that leave `below`."""

    def __init__(self, path: Path, below: Path) -> None:
        self._path, self._below = path, below
        self._offset, self._rest = 0, b""

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Return the lines since the last call; with `is_last`, even one that has no end yet.

        Returns nothing while the log does not exist or storage cannot read it.
        """
        try:
            handle = reading.open_regular(self._path, below=self._below, follow=True)
        except (OSError, ForeignFileError):
            return []
        try:
            added = self._read(handle)
        finally:
            os.close(handle)
        *whole, rest = _ENDS.split(self._rest + added)
        if is_last:
            whole, rest = [*whole, rest], b""
        # Of a line without an end, only the part in which a pattern is searched is kept.
        self._rest = rest[: 4 * LINE_CHARACTERS_MAX]
        return [line.decode(errors="replace") for line in whole if line]

    def _read(self, handle: int) -> bytes:
        added = os.pread(handle, READ_BYTES, self._offset)
        self._offset += len(added)
        return added


class OutputWatch:
    """A thread that reads the output of rank 0 while a launch runs."""

    def __init__(self, pattern: str, below: Path) -> None:
        """`below` is the folder that links of logs must not leave."""
        self._pattern, self._below = pattern, below
        self.progress = OutputProgress(pattern)
        self._tails: list[Tail] = []
        self._has_ended, self._is_done = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="program-output", daemon=True)
        if pattern:
            self._thread.start()

    def begin(self, logs: Sequence[Path]) -> None:
        """Start a new launch, whose output is in `logs`."""
        self._has_ended.clear()
        self._is_done.clear()
        self.progress = OutputProgress(self._pattern)
        self._tails = [Tail(path, self._below) for path in logs]

    def end(self) -> None:
        """Take the output as complete, because the program has ended."""
        self._has_ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all output has been read; return False if it was not in time."""
        return not self._pattern or self._is_done.wait(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._pattern:
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            progress, tails = self.progress, self._tails
            has_ended = self._has_ended.is_set()
            while lines := [line for tail in tails for line in tail.lines(is_last=has_ended)]:
                for line in lines:
                    progress.take(line)
            if has_ended and tails is self._tails:
                self._is_done.set()


LOOK_S: Final = 1.0
# The start of a launch waits at most this long for the first look.
FIRST_LOOK_S: Final = 2.0
# Looks take at most this share of the thread's time, however slow the storage is.
LOOK_SHARE: Final = 0.05
PROBLEMS_NAMED_MAX: Final = 4


@dataclass(eq=False)
class _Launch:
    """What the watch knows about one launch. `ended` is as for `why_incomplete`."""

    number: int
    began_at: float
    ended: str = ""
    is_stopping: bool = False
    has_looked: threading.Event = field(default_factory=threading.Event)
    resumed: int = NOWHERE
    committed: int = NOWHERE
    parent: str | None = None
    at_start: dict[Path, tuple[FileStamp, ...]] = field(default_factory=dict)
    seen: dict[Path, tuple[tuple[FileStamp, ...], float]] = field(default_factory=dict)
    problems: dict[Path, str] = field(default_factory=dict)
    refused: dict[Path, tuple[FileStamp, ...]] = field(default_factory=dict)
    is_done: threading.Event = field(default_factory=threading.Event)


class ProgramWatch:
    """Watches one launch at a time; safe for use by the agent's threads."""

    def __init__(self, context: AgentContext) -> None:
        self._context, self._request = context, context.request
        self._program = context.request.program
        # Where root is mapped to another user, the run's folder shows to which.
        self._pattern = CheckpointPattern(
            self._program,
            context.request.working_directory,
            owners={context.run.directory.stat().st_uid},
        )
        self._output = OutputWatch(self._program.progress, context.attempt.directory)
        self._journal = JournalWriter(context.attempt.node_journal(context.node))
        self._manifests: dict[Path, Manifest] | None = None
        self._launch: _Launch | None = None
        self._noted: set[str] = set()
        self._look_s = 0.0
        self._failure: Exception | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="program-watch", daemon=True)
        self._thread.start()

    # --- Called by the agent's loop.

    def begin(self, launch: int) -> None:
        """Start to watch a launch, whose program must start after this.

        What is there before the program starts is not taken for its work. So this waits for the
        first look, unless storage is slow.
        """
        attempt = self._context.attempt
        self._output.begin([attempt.rank_log(0, launch, 0, name) for name in ("stdout", "stderr")])
        self._launch = _Launch(launch, time.time())
        self._wake.set()
        self._launch.has_looked.wait(FIRST_LOOK_S)

    def stop(self) -> None:
        """Record that the program was told to save and exit."""
        if self._launch is not None:
            self._launch.is_stopping = True

    def end(self, exit_code: int | None) -> None:
        """Take the launch as ended. No process of the program runs; None means it was killed."""
        if self._launch is not None and not self._launch.ended:
            self._output.end()
            self._launch.ended = "exited" if exit_code == 0 else "died"
            self._wake.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything of the ended launch is recorded; return False if it is not yet."""
        return self._launch is None or self._launch.is_done.wait(timeout_s)

    def close(self) -> None:
        """Stop watching. A thread that waits for storage is left behind."""
        if self._over.is_set():
            return
        self._over.set()
        self._wake.set()
        self._thread.join(STOP_WAIT_S)
        self._output.close()
        if not self._thread.is_alive():
            self._journal.close()

    @property
    def completed(self) -> int:
        """The last step that the program is known to have completed, or `NOWHERE`.

        Raises the error of the thread, if it has failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._completed()

    def _completed(self) -> int:
        launch = self._launch
        if launch is None:
            return NOWHERE
        return max(self._output.progress.step, launch.committed, launch.resumed)

    @property
    def resumed(self) -> int:
        """The step after which the launch started, or `NOWHERE` while that is unknown."""
        return self._launch.resumed if self._launch is not None else NOWHERE

    @property
    def phases(self) -> tuple[str, ...]:
        """The program's phase as in a node's report: `TRAIN`, or `STOP` once it was told to."""
        return ("STOP",) if self._launch is not None and self._launch.is_stopping else ("TRAIN",)

    @property
    def step_s(self) -> float:
        """The seconds of a step, by the program's output; 0 while that is unknown."""
        return self._output.progress.step_s

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no checkpoint of the launch was recorded, as sentences; empty if one was."""
        launch = self._launch
        if launch is None or launch.committed > NOWHERE:
            return ()
        if launch.ended == "exited" and 0 < launch.resumed == self._completed():
            # It had nothing left to do.
            return ()
        what = self._unrecorded() or f"nothing new matched {self._pattern.text}"
        return (f"the program completed no checkpoint in this launch: {what}",)

    def _unrecorded(self) -> str:
        named = [f"{path.name}: {why}" for path, why in sorted(self.reasons.items())]
        return "; ".join(named[-PROBLEMS_NAMED_MAX:])

    @property
    def reasons(self) -> dict[Path, str]:
        """Why each checkpoint of the launch that is not recorded is not."""
        return dict(self._launch.problems) if self._launch is not None else {}

    def beats(self, pid: int) -> tuple[RankBeat, ...]:
        """Return the program's part of a heartbeat, as of rank 0 with process `pid`."""
        progress, step = self._output.progress, self._completed()
        if step <= NOWHERE or not pid:
            return ()
        age_s = round(time.monotonic() - progress.changed_at, 3)
        step_s, phase = round(progress.step_s, 6), self.phases[0].lower()
        beat = RankBeat(rank=0, step=step, phase=phase, age_s=age_s, step_time_s=step_s, pid=pid)
        return (beat,)

    # --- The thread.

    def _run(self) -> None:
        pause_s = LOOK_S
        while not self._over.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            launch = self._launch
            if launch is None or self._over.is_set() or launch.is_done.is_set():
                continue
            try:
                self._turn(launch)
            except (OSError, HoldfastError) as error:
                # The storage is unreachable for now. The next check tries again.
                self._note(f"checkpoints of the program could not be recorded: {error}")
            except Exception as error:
                # `completed` raises it in the agent's loop.
                self._failure = error
                return
            pause_s = LOOK_S if launch.ended else max(LOOK_S, self._look_s / LOOK_SHARE)

    def _turn(self, launch: _Launch) -> None:
        """Look once, and record what is complete."""
        ended = launch.ended
        # All of the output, so that its first step is known.
        is_read = not ended or self._output.wait(LOOK_S)
        if self._manifests is None:
            self._manifests = own_checkpoints.recorded(self._context.run, self._pattern)
        began = time.monotonic()
        found = self._pattern.find()
        self._look_s = time.monotonic() - began
        if not launch.has_looked.is_set():
            launch.at_start = {one.path: one.files for one in found}
            launch.has_looked.set()
        self._retire_missing(launch, found)
        for one in found:
            self._consider(launch, self._numbered(launch, one), ended)
        self._find_origin(launch, ended)
        if ended and is_read:
            if what := "; ".join(self.problems) or self._unrecorded():
                self._note(what)
            launch.is_done.set()

    def _retire_missing(self, launch: _Launch, found: list[OwnCheckpoint]) -> None:
        """Retire the manifests of checkpoints that the program has deleted."""
        if not self._pattern.folder.is_dir():
            # The file system may be away, so this proves nothing about the files.
            return
        there = {one.path for one in found}
        for path in sorted((self._manifests or {}).keys() - there):
            self._retire(path, GONE)
        for path in launch.problems.keys() - there:
            del launch.problems[path]

    def _consider(self, launch: _Launch, one: OwnCheckpoint, ended: str) -> None:
        """Record one of the program's checkpoints if it is complete and not recorded yet."""
        known = (self._manifests or {}).get(one.path)
        if known is not None and one.is_recorded_by(known):
            return
        still_s = self._still_s(launch, one)
        if known is not None:
            # A deletion takes a while. It is not taken for a change until it is over.
            if not ended and still_s < self._program.settle_s:
                return
            self._retire(one.path, REPLACED)
        was_seen = launch.at_start.get(one.path) != one.files
        # The program may have written one before this watch first looked.
        is_old = not was_seen and one.changed_at < launch.began_at
        why = own_checkpoints.why_incomplete(
            one, self._program, still_s=still_s, was_seen=was_seen, is_old=is_old, ended=ended
        )
        if not why and not ended and launch.refused.get(one.path) == one.files:
            return
        try:
            if not why:
                self._record(launch, one, is_old=is_old)
        except (CheckpointError, OSError, ValueError) as error:
            # Reading it at every check would cost too much. The last check tries it again. A
            # name that a manifest cannot hold is a ValueError.
            launch.refused[one.path] = one.files
            why = str(error)
        launch.problems[one.path] = why
        if not why:
            del launch.problems[one.path]

    def _numbered(self, launch: _Launch, one: OwnCheckpoint) -> OwnCheckpoint:
        """Return the checkpoint with its step, which the name of an overwritten one lacks."""
        if not self._pattern.is_overwritten:
            return one
        known = (self._manifests or {}).get(one.path)
        # Some programs save again before they print a step.
        step = max(self._output.progress.step_at(one.changed_at), launch.resumed)
        least = launch.committed + 1
        if not self._program.progress:
            # Its saves are counted.
            least = max(least, launch.resumed + 1, 1)
        return own_checkpoints.number(one, known, step, least)

    @staticmethod
    def _still_s(launch: _Launch, one: OwnCheckpoint) -> float:
        """Return for how many seconds this watch has seen the files unchanged."""
        now = time.monotonic()
        files, since = launch.seen.get(one.path, ((), now))
        if files != one.files:
            since = now
        launch.seen[one.path] = (one.files, since)
        return now - since

    def _record(self, launch: _Launch, one: OwnCheckpoint, *, is_old: bool) -> None:
        """Commit a manifest. Raises `CheckpointError` if the step has one from other files."""
        began = time.monotonic()
        files = own_checkpoints.seal(one, lambda: not self._over.is_set())
        attempt, number = self._context.attempt.number, launch.number
        if is_old:
            attempt, number = self._writer_of(one, (attempt, number))
            earlier = own_checkpoints.newest_before(self._newest(), one.step)
            parent = earlier.id if earlier else None
        else:
            self._find_origin(launch, "", before=one.step)
            parent = launch.parent
        name = CheckpointName(one.step, attempt, number)
        manifest = Manifest(
            run_uid=self._request.run_uid,
            run=self._request.run,
            name=str(name),
            step=one.step,
            attempt=attempt,
            launch=number,
            world_size=self._request.world_size,
            parent=parent,
            reason=_reason(launch),
            command_digest=self._request.command_digest,
            files=files,
            source=str(one.folder),
            flush_s=time.monotonic() - began,
            staged_at=one.changed_at,
            committed_at=time.time(),
        )
        if not record_source(self._context.run, manifest):
            raise CheckpointError(f"step {one.step} has been recorded from other files, as {name}")
        assert self._manifests is not None
        self._manifests[one.path] = manifest
        if not is_old:
            launch.committed = max(launch.committed, one.step)
            launch.parent = manifest.id
        self._journal.append(
            EventKind.COMMITTED,
            attempt=attempt,
            launch=number,
            checkpoint=manifest.name,
            step=manifest.step,
            bytes=manifest.bytes,
            flush_s=manifest.flush_s,
            reason=manifest.reason,
        )

    def _retire(self, path: Path, reason: str) -> None:
        """Record that a checkpoint no longer exists as its manifest describes it."""
        assert self._manifests is not None
        manifest = self._manifests[path]
        self._journal.append(
            EventKind.CHECKPOINT_DELETED, checkpoint=manifest.name, reason=reason, by=PROGRAM
        )
        retire_source(self._context.run, manifest.name)
        del self._manifests[path]

    def _find_origin(self, launch: _Launch, ended: str, before: int | None = None) -> None:
        """Journal once where the launch started: the newest checkpoint before its first step.

        Its first step is the first one in its output, or else that of its first checkpoint, which
        is `before`. Without a pattern for its output, it is taken to start at the newest one. So
        is a program that has only one.
        """
        if launch.resumed > NOWHERE:
            return
        first, is_only = self._output.progress.first, self._pattern.is_overwritten
        if first > NOWHERE and not is_only:
            origin = own_checkpoints.newest_before(self._newest(), first, or_at=True)
        elif before is not None and not is_only:
            origin = own_checkpoints.newest_before(self._newest(), before)
        elif is_only or not self._program.progress or ended == "exited":
            origin = max(self._newest(), key=lambda one: one.step, default=None)
        else:
            return
        launch.resumed = origin.step if origin else 0
        launch.parent = origin.id if origin else None
        self._journal.append(
            EventKind.RESUMED,
            attempt=self._context.attempt.number,
            launch=launch.number,
            checkpoint=origin.id if origin else None,
            step=launch.resumed,
            command_digest=self._request.command_digest,
            argv=list(self._request.command),
            world_size=self._request.world_size,
        )

    def _newest(self) -> list[Manifest]:
        return list((self._manifests or {}).values())

    def _writer_of(self, one: OwnCheckpoint, current: tuple[int, int]) -> tuple[int, int]:
        """Return the attempt and launch that wrote files which were there before this launch.

        That is the last launch which began before their last change. Files from before the run's
        first launch count as of the `current` one.
        """
        starts = [
            (event.time, int(event.data.get("attempt") or 0), int(event.data.get("launch") or 0))
            for event in load_events(self._context.run)
            if event.kind is EventKind.LAUNCH_STARTED and event.time <= one.changed_at
        ]
        return max(starts)[1:] if starts else current

    def _note(self, text: str) -> None:
        """Journal a note, once, if storage allows."""
        if text in self._noted:
            return
        self._noted.add(text)
        with contextlib.suppress(OSError):
            self._journal.append(EventKind.NOTE, attempt=self._context.attempt.number, text=text)


def _reason(launch: _Launch) -> str:
    """Return the reason of a checkpoint, as other checkpoints have one."""
    if launch.is_stopping or launch.ended == "exited":
        return "final"
    return "crash" if launch.ended else "interval"
