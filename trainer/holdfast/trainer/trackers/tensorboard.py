"""TensorBoard: one log directory for each run of Holdfast.

`SummaryWriter(purge_step=…)` of torch hides the points after the step that a launch resumed from,
so the curves have each step once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
from holdfast.trainer.versions import require

FOLDER: Final = "tensorboard"


class TensorBoardTracker(Tracker):
    """Event files of TensorBoard, in `directory` or in the run's folder `tensorboard`."""

    name: ClassVar[str] = "tensorboard"
    has_dropped_later = True

    def __init__(self, directory: str | Path | None = None) -> None:
        """Raises `PreflightError` if tensorboard is missing or not supported."""
        require("tensorboard")
        self._directory = None if directory is None else Path(directory)
        self._writer: Any = None

    def open(self, run: TrackedRun) -> str:
        """Open a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        directory = self._directory or run.directory / FOLDER
        self._writer = SummaryWriter(str(directory), purge_step=run.step + 1)
        return str(directory)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, is_orderly: bool) -> None:
        """Write what is left."""
        self._writer.close()
