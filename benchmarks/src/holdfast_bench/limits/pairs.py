"""Measures limits, Holdfast and stock DCP in turn on one state: the pairs for the ratios.

`runner` starts this. Each pair runs every operation once, in a different order, so that a busy
moment or an effect of the preceding operation affects all of them alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

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
from holdfast_bench.limits.loads import load_cold, load_stock
from holdfast_bench.limits.order import balanced_order
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained
from holdfast_bench.limits.saves import Saver
from holdfast_bench.limits.stock import MODES, StockSaver

Act = Callable[[], None]


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
