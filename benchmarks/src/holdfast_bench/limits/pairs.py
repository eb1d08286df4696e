"""Measures limits, Holdfast and stock DCP in turn on one state: the pairs for the ratios.

`runner` starts this. Each pair runs every operation once, in a different order, so that a busy
moment or an effect of the preceding operation affects all of them alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from holdfast.trainer.loading.reader import load_state
from holdfast_bench.limits.files import (
    create_small,
    drop_cache,
    read_files,
    ready_pages,
    remove,
    share_out,
    sizes_of,
    write_files,
)
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained, balanced_order
from holdfast_bench.limits.saves import Saver

Act = Callable[[], None]
MODES: Final = ("sync", "thread", "process")
SAVE_TIMEOUT_S: Final = 240.0


def load_cold(program: Program, trained: Trained, directory: Path) -> tuple[float, float]:
    """Load with Holdfast. Return (seconds of the slowest rank, bytes that all ranks read)."""
    state = trained.state()
    return _measured(program, lambda: load_state(directory, state, group=dist.group.WORLD))


def load_stock(program: Program, trained: Trained, directory: Path) -> tuple[float, float]:
    """Load with stock DCP. Return (seconds of the slowest rank, bytes that all ranks read)."""
    state = trained.state()
    return _measured(program, lambda: load_with_dcp(state, checkpoint_id=directory))


def _measured(program: Program, act: Callable[[], object]) -> tuple[float, float]:
    before = bytes_read()
    program.meet()
    began = time.perf_counter()
    act()
    seconds = program.slowest(time.perf_counter() - began)
    return seconds, program.together(bytes_read() - before)


def bytes_read() -> int:
    """Return the bytes that this process got from read calls, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


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


class Pairs:
    """The operations of a pair. Each records the seconds of the slowest rank."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._trained = Trained(program.settings["state_bytes"])
        self._saver = Saver(program, self._trained, program.directory / "pairs")
        self._stock = StockSaver(program, self._trained, program.directory)
        first = self._saver.save()
        program.note(**{"first.blocked": first.blocked, "first.committed": first.committed})
        self._newest = first.directory
        sizes = sizes_of(first.directory)
        share = share_out(sizes, program.ranks)[program.rank]
        self._share = {name: size for name, size in share.items() if name != "manifest.json"}
        self._image = Image(self._trained.tensors(), sum(share.values()))
        self._numbers = itertools.count()
        unique = self._trained.unique_bytes()
        program.facts |= {"unique_bytes": unique, "files": len(sizes), "bytes": sum(sizes.values())}
        program.facts["cold_resident"] = 0.0

    def run(self) -> None:
        """Run the first save of every stock mode, then the requested number of pairs."""
        for mode in MODES:
            self._stock.save(mode, "first.stock")
        loads: list[Act] = [self._read_raw, self._load, self._load_stock]
        saves: list[Act] = [self._write_raw, self._save, self._create_small]
        saves += [self._save_stock(mode) for mode in MODES]
        for pair in range(self._program.settings["pairs"]):
            if pair and not self._program.is_time_left():
                break
            self._trained.update()
            for acts in (saves, loads):
                for number in balanced_order(len(acts), pair):
                    acts[number]()
        self._saver.keep_only(self._newest)
        self._saver.session.close()
        self._stock.close()
        self._program.facts["checkpoint"] = str(self._newest)

    def _write_raw(self) -> None:
        """Write files of the same number and sizes as a checkpoint, on all ranks at once."""
        directory = self._fresh("raw")
        self._ready()
        self._program.note(
            raw_write=self._program.measure(
                lambda: write_files(directory, self._share, self._image.bytes)
            )
        )
        self._clear(directory)

    def _create_small(self) -> None:
        directory = self._fresh("small")
        seconds = self._program.measure(
            lambda: create_small(directory, self._numbers) if self._program.rank == 0 else None
        )
        self._program.note(creates=seconds)
        self._clear(directory)

    def _save(self) -> None:
        self._ready()
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        done = self._saver.save()
        memcpy.measure()
        self._program.note(memcpy=memcpy.seconds)
        self._program.note(
            **{"save.blocked": done.blocked, "save.committed": done.committed, "tail": done.tail}
        )
        self._newest = done.directory
        self._saver.keep_only(done.directory)

    def _save_stock(self, mode: str) -> Act:
        def act() -> None:
            self._ready()
            self._stock.save(mode, "stock")

        return act

    def _read_raw(self) -> None:
        self._cool(self._newest)
        self._program.note(
            raw_read=self._program.measure(
                lambda: read_files(self._newest, self._share, self._image.bytes)
            )
        )

    def _load(self) -> None:
        self._cool(self._newest)
        seconds, count = load_cold(self._program, self._trained, self._newest)
        self._program.note(load=seconds, load_bytes=count)

    def _load_stock(self) -> None:
        self._cool(self._stock.newest)
        seconds, count = load_stock(self._program, self._trained, self._stock.newest)
        self._program.note(**{"stock.load": seconds, "stock.load_bytes": count})

    def _cool(self, directory: Path) -> None:
        cool(self._program, directory)
        self._ready()

    def _ready(self) -> None:
        ready_pages(sum(self._share.values()))

    def _fresh(self, kind: str) -> Path:
        """Create a new directory for all ranks."""
        directory = self._program.directory / f"{kind}-{next(self._numbers)}"
        if self._program.rank == 0:
            directory.mkdir()
        self._program.meet()
        return directory

    def _clear(self, directory: Path) -> None:
        self._program.meet()
        if self._program.rank == 0:
            remove(directory)
        self._program.meet()


def cool(program: Program, directory: Path) -> None:
    """Drop a checkpoint from the page cache, and record the largest share that stayed."""
    if program.rank == 0:
        left = drop_cache([path for path in directory.rglob("*") if path.is_file()])
        program.facts["cold_resident"] = max(left, program.facts["cold_resident"])
    program.meet()


def main() -> None:
    program = Program()
    Pairs(program).run()
    program.finish()


if __name__ == "__main__":
    main()
