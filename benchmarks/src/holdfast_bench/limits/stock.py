"""Saves by stock DCP in its three modes with its defaults, for comparison with Holdfast."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from holdfast_bench.limits.files import remove
from holdfast_bench.limits.ranks import Program, Trained

MODES: Final = ("sync", "thread", "process")
SAVE_TIMEOUT_S: Final = 240.0


class StockSaver:
    """Saves into a new directory each time and removes the one before."""

    def __init__(self, program: Program, trained: Trained, directory: Path) -> None:
        self._program, self._trained, self._directory = program, trained, directory
        self._numbers = itertools.count()
        self.newest = directory / "stock-none"

    def save(self, mode: str, prefix: str) -> None:
        """Save once in `mode`. Records `<prefix>.<mode>.blocked` and `.committed`.

        As for Holdfast, collecting the state dict is part of the blocked time.
        """
        target = self._directory / f"stock-{next(self._numbers)}"
        self._program.meet()
        began = time.perf_counter()
        wait = self._begin(mode, target)
        held = time.perf_counter() - began
        wait()
        done = time.perf_counter() - began
        self._program.note(
            **{
                f"{prefix}.{mode}.blocked": self._program.slowest(held),
                f"{prefix}.{mode}.committed": self._program.slowest(done),
            }
        )
        former, self.newest = self.newest, target
        if self._program.rank == 0 and former.exists():
            remove(former)
        self._program.meet()

    def close(self) -> None:
        """Remove the last directory too."""
        if self._program.rank == 0:
            remove(self.newest)

    def _begin(self, mode: str, target: Path) -> Callable[[], Any]:
        """Start a save and return a function that waits for its end."""
        state = self._trained.state()
        if mode == "sync":
            save_stock(state, checkpoint_id=target)
            return lambda: None
        kind = AsyncCheckpointerType(mode)
        future = async_save(state, checkpoint_id=target, async_checkpointer_type=kind)
        if isinstance(future, AsyncSaveResponse):
            future = future.upload_completion
        return lambda: future.result(SAVE_TIMEOUT_S)
