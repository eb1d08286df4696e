"""How long saves block whose copies continue during the next step, and what the step then costs.

`runner` starts this. A step takes twice as long as a plain copy of the state. It either waits, as
for an accelerator, or computes with one thread in each rank.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from holdfast_bench.limits.commits import wait_until_durable
from holdfast_bench.limits.files import ready_pages
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained
from holdfast_bench.limits.saves import Saver

STEP_COPIES: Final = 2.0
MATRIX_WIDTH: Final = 256
CALIBRATION_S: Final = 0.2


class Overlap:
    """The operations of a pair. Each records the seconds of the slowest rank."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._trained = Trained(program.settings["state_bytes"])
        self._saver = Saver(program, self._trained, program.directory / "overlap", overlap=True)
        tensors = self._trained.tensors()
        self._bytes = sum(tensor.nbytes for tensor in tensors)
        self._image = Image(tensors, self._bytes)
        self._matrix = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH, device="cpu") / MATRIX_WIDTH
        self._product_s = self._calibrate()
        # The first copy of a launch is complete at once. The next update shows that others may go
        # on.
        self._saver.save()
        self._trained.update()

    def run(self) -> None:
        """Measure the requested number of pairs, each way first in every other one."""
        for pair in range(self._program.settings["pairs"]):
            if pair and not self._program.is_time_left():
                break
            acts = [self._save_beside_a_wait, self._save_beside_products]
            for act in acts if pair % 2 else acts[::-1]:
                act()
        self._saver.session.close()

    def _save_beside_a_wait(self) -> None:
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        step_s = STEP_COPIES * memcpy.seconds
        blocked = self._begin()
        time.sleep(step_s)
        blocked += self._wait()
        self._end()
        memcpy.measure()
        self._program.note(
            memcpy=memcpy.seconds, **{"save.overlapped": self._program.slowest(blocked)}
        )

    def _save_beside_products(self) -> None:
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        count = max(1, round(STEP_COPIES * memcpy.seconds / self._product_s))
        before = self._program.measure(lambda: self._multiply(count))
        self._begin()
        during = self._program.measure(lambda: self._multiply(count))
        self._wait()
        self._end()
        after = self._program.measure(lambda: self._multiply(count))
        self._program.note(step_alone=(before + after) / 2, step_during_copy=during)

    def _begin(self) -> float:
        """Save at a boundary. Return the seconds for which it held this rank."""
        self._trained.update()
        ready_pages(self._bytes)
        self._saver.session.checkpoint()
        self._program.meet()
        began = time.perf_counter()
        self._saver.session.boundary()
        return time.perf_counter() - began

    def _wait(self) -> float:
        """Wait for the copy as an optimizer does. Return the seconds."""
        began = time.perf_counter()
        self._saver.session.before_update()
        return time.perf_counter() - began

    def _end(self) -> None:
        """Wait until the checkpoint is committed, so that no flush runs beside what follows."""
        saver, program = self._saver, self._program
        if program.rank == 0:
            wait_until_durable(saver.run, saver.session.step)
        program.meet()
        saver.keep_only(saver.run.latest.resolve())

    def _calibrate(self) -> float:
        """Return the median seconds of one product on the slowest rank."""
        spent: list[float] = []
        while sum(spent) < CALIBRATION_S:
            began = time.perf_counter()
            self._multiply(1)
            spent.append(time.perf_counter() - began)
        return self._program.slowest(statistics.median(spent))

    def _multiply(self, count: int) -> None:
        product = self._matrix
        for _ in range(count):
            product = self._matrix @ product


def main() -> None:
    program = Program()
    Overlap(program).run()
    program.finish()


if __name__ == "__main__":
    main()
