"""What a tracker must do, and what it learns of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The facts of this launch that a tracker needs to continue its run.

    `step` is the number of complete steps after the resume. `known_id` is the tracker's own id that
    an earlier launch recorded in the journal. `forked_from` is a checkpoint id if the run was
    forked, and `parent_id` is the tracker's id of the run that it was forked from.
    """

    uid: str
    name: str
    directory: Path
    attempt: int
    launch: int
    world_size: int
    step: int
    known_id: str | None = None
    forked_from: str | None = None
    parent_id: str | None = None

    @property
    def facts(self) -> dict[str, str]:
        """The facts that are the same in all launches, as text."""
        found = {"run": self.name, "run_uid": self.uid, "forked_from": self.forked_from}
        return {name: value for name, value in found.items() if value}


class Tracker(ABC):
    """An experiment tracker. Only rank 0 uses it.

    `open` is called on the thread of the program, `log` and `close` on a thread of Holdfast. Their
    errors are reported and never end training.
    """

    name: ClassVar[str]
    # True if the tracker itself drops the points after the step that a launch resumed from.
    has_dropped_later = False
    # True if what `log` has returned from outlives this process. A later launch then does not send
    # these steps again.
    keeps_at_once: ClassVar[bool] = False

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Create the tracker's run, or continue it. Return the tracker's id of it."""

    @property
    def url(self) -> str | None:
        """The web page of the tracker's run once it is open, if there is one."""
        return None

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step. With `keeps_at_once`, no step comes twice."""

    def log_reported(self, step: int, values: Mapping[str, float]) -> None:
        """Record what an evaluation reported for the checkpoint of `step`, at any time."""
        self.log(step, values)

    @abstractmethod
    def close(self, *, is_orderly: bool) -> None:
        """Send what is left. `is_orderly` is False if the program failed."""
