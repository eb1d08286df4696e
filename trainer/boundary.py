"""Saves as a session makes them: staged at a boundary, followed up at later ones, journaled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.board import Phase, RankRecord
from holdfast.contracts.errors import SaveError
from holdfast.contracts.journal import EventKind
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.paths import checkpoint_id
from holdfast.contracts.slots import SLOTS_PER_RANK
from holdfast.trainer.collective import Ranks
from holdfast.trainer.engine import CheckpointEngine, SaveResult
from holdfast.trainer.link import Link
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.train_state import State

# The longest that a flush may take before a session that ends gives up on it.
FLUSH_TIMEOUT_S: Final = 1800.0
BEAT_S: Final = 1.0

Captured = tuple[State, dict[str, Any]]


class Saver:
    """Drives the checkpoint engine of one rank, and keeps count of what is in flight."""

    def __init__(
        self, link: Link, ranks: Ranks, record: RankRecord, recorder: Recorder | None
    ) -> None:
        self._link, self._record, self._recorder = link, record, recorder
        self._ranks = ranks
        self.engine = CheckpointEngine(
            flusher=link.flusher,
            run=link.run,
            identity=link.identity,
            group=ranks.group,
            stage_group=link.group,
        )
        self.in_flight: dict[str, int] = {}
        self._failed: dict[int, str] = {}
        self._staged_step = 0
        self._parent: str | None = None

    @property
    def is_busy(self) -> bool:
        """True while every slot of this rank is still being written."""
        return len(self.in_flight) >= SLOTS_PER_RANK

    def began_at(self, step: int, checkpoint: str | None) -> None:
        """The state as restored: `step` needs no save, `checkpoint` is the first parent's id."""
        self._staged_step, self._parent = step, checkpoint

    def prepare(self, captured: Captured) -> None:
        """Plan for states like `captured`; all ranks call it together. Raises `SaveError`."""
        self._record.beat(Phase.SAVE)
        self.engine.prepare(captured[0], timeout_s=FLUSH_TIMEOUT_S)

    def is_changed(self, captured: Captured) -> bool:
        """True when this rank's state needs another plan; then all ranks must `prepare`."""
        return self.engine.changes(captured[0]) is not None

    def save(self, captured: Captured, *, step: int, reason: str) -> None:
        """Stage `captured` as the checkpoint of `step`; returns as soon as it is sealed.

        Raises `SaveError` when it cannot be staged.
        """
        self._record.beat(Phase.SAVE)
        state, document = captured
        began = time.monotonic()
        name = self.engine.save(
            state,
            document,
            step=step,
            reason=reason,
            parent=self._parent,
            metrics=dict(self._recorder.latest) if self._recorder else None,
            must=True,
            timeout_s=FLUSH_TIMEOUT_S,
        )
        if name is None:
            raise SaveError(f"step {step}: no staging slot came free in {FLUSH_TIMEOUT_S:.0f} s")
        self.in_flight[name] = step
        self._staged_step = step
        blocked_s = round(time.monotonic() - began, 6)
        self._note(
            EventKind.STAGED,
            checkpoint=name,
            step=step,
            bytes=self.engine.tensor_bytes,
            blocked_s=blocked_s,
            reason=reason,
        )

    def passed_over(self, step: int) -> None:
        """Note that a checkpoint was due but the storage is two of them behind."""
        text = f"step {step}: no checkpoint, the last {SLOTS_PER_RANK} are still being written"
        self._note(EventKind.NOTE, text=text)

    def collect(self) -> None:
        """Take up what became of saves since the last call; reads shared memory only."""
        for result in self.engine.poll():
            self._take(result)

    def wait(self) -> None:
        """Wait until nothing is in flight, for `FLUSH_TIMEOUT_S` at most."""
        give_up = time.monotonic() + FLUSH_TIMEOUT_S
        self.collect()
        while self.in_flight and time.monotonic() < give_up:
            self._record.beat(Phase.SAVE)
            for result in self.engine.wait(BEAT_S):
                self._take(result)

    def finish(self, capture: Callable[[], Captured], *, step: int) -> None:
        """Commit `step` unless it is committed, or just what was restored.

        Raises `SaveError` when the checkpoint of `step` did not become durable.
        """
        if step != self._staged_step:
            self.collect()
            captured = capture()
            # All ranks are here: the one collective that a last save takes.
            if self._ranks.largest([self.is_changed(captured)])[0]:
                self.prepare(captured)
            self.save(captured, step=step, reason="final")
        self.wait()
        waiting = [name for name, number in self.in_flight.items() if number == step]
        problem = self._failed.get(step)
        if waiting:
            problem = f"still being written after {FLUSH_TIMEOUT_S:.0f} s"
        if problem:
            raise SaveError(
                f"the last checkpoint, of step {step}, was not committed: {problem}. The newest "
                f"committed one is {self._parent or 'none'}; make room or mend the storage, then "
                "run the same command"
            )

    def close(self) -> None:
        """Let the engine go; what is sealed is finished by the flusher."""
        self.engine.close()

    def _take(self, result: SaveResult) -> None:
        self.in_flight.pop(result.checkpoint, None)
        facts: dict[str, Any] = {"checkpoint": result.checkpoint, "step": result.step}
        if not result.committed:
            problem = result.error or "for no stated reason"
            self._failed[result.step] = problem
            self._note(EventKind.SAVE_FAILED, **facts, error=problem)
            if self._recorder is not None:
                # A full disk may take neither the checkpoint nor this line: training goes on.
                with contextlib.suppress(OSError):
                    print(f"holdfast: {result.checkpoint} was not saved: {problem}", flush=True)
            return
        self._parent = checkpoint_id(self._link.run.name, result.checkpoint)
        directory = self._link.run.checkpoint(result.checkpoint)
        self._note(EventKind.COMMITTED, lambda: _measured(directory), **facts)

    def _note(
        self, kind: EventKind, more: Callable[[], dict[str, Any]] | None = None, **data: Any
    ) -> None:
        if self._recorder is not None:
            identity = self._link.identity
            facts = {"attempt": identity.attempt, "incarnation": identity.incarnation}
            self._recorder.event(kind, more, **facts, **data)


def _measured(directory: Path) -> dict[str, Any]:
    """What the manifest says of a committed save; nothing when it was deleted meanwhile."""
    manifest = read_manifest(directory)
    return {"bytes": manifest.bytes, "flush_s": manifest.flush_s} if manifest else {}
