"""What a save costs in each staging mode, beside a copy and a raw write of the same pair.

`runner` starts this. A process has one session at a time, so each save has a separate session. A
save before it allocates the images. While the checkpoint is written, each rank computes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.contracts.environment import STAGING_DIRECTORY
from holdfast_bench.limits.commits import newest_durable, wait_until_durable
from holdfast_bench.limits.figures import STAGING_MODES
from holdfast_bench.limits.files import ready_pages, remove, share_out, sizes_of, write_files
from holdfast_bench.limits.products import Products
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained, balanced_order
from holdfast_bench.limits.saves import Saver

ALONE_S: Final = 0.5


class StagingModes:
    """The operations of a pair: a raw write, and a save in each mode."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._trained = Trained(program.settings["state_bytes"])
        tensors = self._trained.tensors()
        self._bytes = sum(tensor.nbytes for tensor in tensors)
        self._image = Image(tensors, self._bytes)
        self._products = Products(program)
        self._numbers = itertools.count()
        # The images on disk are on the disk of the checkpoints.
        os.environ[STAGING_DIRECTORY] = str(program.directory.absolute())
        first = Saver(program, self._trained, program.directory / "first")
        sizes = sizes_of(first.save().directory)
        first.session.close()
        self._share = share_out(sizes, program.ranks)[program.rank]
        self._clear("first")

    def run(self) -> None:
        """Measure the requested number of pairs, in an order that changes from pair to pair."""
        acts: list[Callable[[], None]] = [
            self._write_raw,
            *(partial(self._save, mode) for mode in STAGING_MODES),
        ]
        for pair in range(self._program.settings["pairs"]):
            if pair and not self._program.is_time_left():
                break
            for number in balanced_order(len(acts), pair):
                acts[number]()

    def _write_raw(self) -> None:
        folder = self._program.directory / "raw"
        if self._program.rank == 0:
            folder.mkdir()
        ready_pages(sum(self._share.values()))
        seconds = self._program.measure(lambda: write_files(folder, self._share, self._image.bytes))
        self._program.note(raw_write=seconds)
        self._clear("raw")

    def _save(self, mode: str) -> None:
        name = f"{mode}-{next(self._numbers)}"
        saver = Saver(self._program, self._trained, self._program.directory / name, staging=mode)
        saver.keep_only(saver.save().directory)
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        done = saver.save()
        memcpy.measure()
        saver.keep_only(done.directory)
        alone = self._products.seconds_for(ALONE_S)
        saver.session.checkpoint()
        self._program.meet()
        saver.session.boundary()
        during = self._products.seconds_until(
            lambda: newest_durable(saver.run) >= saver.session.step
        )
        if self._program.rank == 0:
            wait_until_durable(saver.run, saver.session.step)
        self._program.meet()
        saver.session.close()
        self._program.note(
            **{
                f"{mode}.memcpy": memcpy.seconds,
                f"{mode}.blocked": done.blocked,
                f"{mode}.committed": done.committed,
                f"{mode}.product_alone": alone,
                f"{mode}.product_during_write": during,
            }
        )
        self._clear(name)

    def _clear(self, name: str) -> None:
        self._program.meet()
        if self._program.rank == 0:
            remove(self._program.directory / name)
        self._program.meet()


def main() -> None:
    program = Program()
    StagingModes(program).run()
    program.finish()


if __name__ == "__main__":
    main()
