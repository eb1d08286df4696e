"""Saves through a `Session` as in a training loop, with the times that count."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.session.session import Session
from holdfast_bench.limits.commits import data_fsynced_at, wait_until_durable
from holdfast_bench.limits.files import remove
from holdfast_bench.limits.ranks import Program, Trained

# No save happens on schedule: the benchmark requests each one.
NEVER: Final = 1_000_000_000


@dataclass(frozen=True)
class Save:
    """One save: seconds that the slowest rank was blocked, seconds until durable, and the tail.

    The tail is the time from the last data fsync to the commit. It is 0 except on rank 0.
    """

    blocked: float
    committed: float
    tail: float
    directory: Path


class Saver:
    """A session that saves once per request. All ranks use it in the same way.

    `prepared` is the slowest rank's seconds to create it, including the flusher's start and the
    plan of the saves.
    """

    def __init__(
        self,
        program: Program,
        trained: Trained,
        run: Path,
        *,
        overlap: bool = False,
        staging: str = "memory",
    ) -> None:
        self._program = program
        began = time.perf_counter()
        self.session = Session(
            trained.model,
            trained.optimizer,
            directory=run,
            interval=NEVER,
            overlap=overlap,
            staging=staging,
        )
        self.prepared = program.slowest(time.perf_counter() - began)
        self.run = RunPaths(run)

    def save(self) -> Save:
        """Save at the boundary of a step and wait until it is committed.

        Raises `SaveError` if it is not committed in time.
        """
        self.session.checkpoint()
        self._program.meet()
        began = time.perf_counter()
        self.session.boundary()
        held = time.perf_counter() - began
        tail = 0.0
        if self._program.rank == 0:
            durable_at = wait_until_durable(self.run, self.session.step)
            tail = durable_at - data_fsynced_at(self.run.latest.resolve())
        committed = self._program.slowest(time.perf_counter() - began)
        blocked = self._program.slowest(held)
        return Save(blocked, committed, tail, self.run.latest.resolve())

    def keep_only(self, directory: Path) -> None:
        """Delete every other checkpoint, so that the disk does not fill."""
        if self._program.rank == 0:
            for other in self.run.list_checkpoints():
                if other != directory:
                    remove(other)
        self._program.meet()
