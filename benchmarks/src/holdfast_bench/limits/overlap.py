"""How long saves block whose copies continue during the next step, and what training then costs.

`runner` starts this. A step takes twice as long as a plain copy of the state. It either waits, as
for an accelerator, or computes with the rank's threads. Each operation is also measured with
torch_checkpointing, if that is installed. At the end, a session writes with `write_limit`. With
`leaves_core_free`, the rank has one thread, and only its own steps beside copies are measured.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.environment import CHECKPOINT_WRITE_LIMIT
from holdfast_bench.limits.commits import newest_durable, wait_until_durable
from holdfast_bench.limits.figures import LIMITED, PEER
from holdfast_bench.limits.files import ready_pages, remove
from holdfast_bench.limits.products import Products
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained, balanced_order
from holdfast_bench.limits.saves import Saver

STEP_COPIES: Final = 2.0
CALIBRATION_S: Final = 0.2
# The shortest time of a write that counts.
WRITE_S_MIN: Final = 0.02
# The limited session writes at this share of the speed of the last write without a limit.
LIMITED_SHARE: Final = 0.25
LIMITED_PAIRS: Final = 3
# The saves before the first pair, after the first one of a launch: one for each slot.
WARM_UP_SAVES: Final = 2
FOLDER: Final = Path(__file__).resolve().parents[4] / ".setup" / "bench-peers"
# It starts a process that imports torch.
START_S: Final = 120
SAVE_TIMEOUT_S: Final = 240.0
POLL_S: Final = 0.01


def add_folder() -> None:
    """Let this process import the peers that the checkout's set-up has installed."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def installed_version() -> str | None:
    """Return the version of torch_checkpointing, None if it is not installed."""
    add_folder()
    try:
        return version(PEER)
    except PackageNotFoundError:
        return None


class TorchCheckpointing:
    """Saves of the live state of a program, as torch_checkpointing's tutorial makes them.

    `infra/setup/bench_peers.sh` installs it into a folder of the checkout, because nothing else
    needs it. Its class for loads at another rank count needs CUDA, so the state is saved without
    it. Its direct writes fail on ext4, so they are off. It does not call fsync.
    """

    def __init__(self, program: Program, trained: Trained, directory: Path) -> None:
        add_folder()
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._program, self._trained, self._directory = program, trained, directory
        self._numbers = itertools.count()
        self._written: Any = None
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=START_S)
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(process_config=process),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = CheckpointManager(config)
        self._target = directory

    def begin(self) -> None:
        """Begin a save, as the training loop does between two steps."""
        self._target = self._directory / f"peer-{next(self._numbers)}"
        state = {
            "model": self._trained.model.state_dict(),
            "optimizer": self._trained.optimizer.state_dict(),
        }
        self._written = self._manager.save(str(self._target), state)

    def wait_for_copy(self) -> None:
        """Wait until the state may change, as before the optimizer's step."""
        with self._manager.lock():
            pass

    @property
    def is_written(self) -> bool:
        """True once its process has written the files of this rank."""
        return bool(self._written.done())

    def wait_until_written(self) -> None:
        """Wait for this rank's files. Raises what its process raised."""
        self._written.result(SAVE_TIMEOUT_S)

    def end(self) -> None:
        """Wait until it is written, and remove it."""
        self.wait_until_written()
        # Its lock is released by another thread after that.
        time.sleep(POLL_S)
        self._program.meet()
        if self._program.rank == 0:
            remove(self._target)
        self._program.meet()

    def close(self) -> None:
        """End its process."""
        self._manager.close()


class Overlapped(Protocol):
    """A way to save whose copy continues during the next step."""

    def begin(self) -> None:
        """Begin a save at a step boundary."""

    def wait_for_copy(self) -> None:
        """Wait until the state may change."""

    @property
    def is_written(self) -> bool: ...

    def end(self) -> None:
        """Wait until it is written. All ranks call this together."""


class Ours:
    """Saves of a session with `overlap`."""

    def __init__(self, program: Program, trained: Trained, folder: str = "overlap") -> None:
        self._program = program
        self._saver = Saver(program, trained, program.directory / folder, overlap=True)

    def begin(self) -> None:
        self._saver.session.boundary()

    def wait_for_copy(self) -> None:
        self._saver.session.before_update()

    @property
    def is_written(self) -> bool:
        return newest_durable(self._saver.run) >= self._saver.session.step

    def ask(self) -> None:
        """Request the save that the next boundary begins."""
        self._saver.session.checkpoint()

    def try_out(self) -> None:
        """Save once: the first copy of a launch is complete at once."""
        self._saver.save()

    def end(self) -> None:
        """Wait until the checkpoint is committed, so that no flush runs beside what follows."""
        if self._program.rank == 0:
            wait_until_durable(self._saver.run, self._saver.session.step)
        self._program.meet()
        self._saver.keep_only(self._saver.run.latest.resolve())

    @property
    def write_speed(self) -> float:
        """The bytes per second at which the newest checkpoint was written."""
        manifest = read_manifest(self._saver.run.latest.resolve())
        speed = 0.0 if manifest is None else manifest.bytes / max(manifest.flush_s, WRITE_S_MIN)
        return self._program.slowest(speed)

    def close(self) -> None:
        self._saver.session.close()


class Overlap:
    """The operations of a pair. Each records the seconds of the slowest rank."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._leaves_core_free = bool(program.settings.get("leaves_core_free"))
        if self._leaves_core_free:
            torch.set_num_threads(1)
        self._trained = Trained(program.settings["state_bytes"])
        tensors = self._trained.tensors()
        self._bytes = sum(tensor.nbytes for tensor in tensors)
        self._image = Image(tensors, self._bytes)
        self._products = Products(program)
        self._product_s = self._products.seconds_for(CALIBRATION_S)
        self._ours = Ours(program, self._trained)
        # The update after it shows that the copies of others may continue.
        self._ours.try_out()
        self._trained.update()
        self._peer = self._open_peer()
        for way, _ in self._ways():
            for _ in range(WARM_UP_SAVES):
                self._prepare(way)
                way.begin()
                way.wait_for_copy()
                way.end()

    def run(self) -> None:
        """Measure the requested number of pairs, in an order that changes from pair to pair."""
        kinds = [self._save_beside_a_wait, self._save_beside_products]
        acts = [
            partial(act, way, prefix)
            for way, prefix in self._ways()
            for act in (kinds[1:] if self._leaves_core_free else kinds)
        ]
        for pair in range(self._program.settings["pairs"]):
            if pair and not self._program.is_time_left():
                break
            for number in balanced_order(len(acts), pair):
                acts[number]()
        limit = LIMITED_SHARE * self._ours.write_speed
        self._ours.close()
        if self._peer is not None:
            self._peer.close()
        if not self._leaves_core_free:
            self._run_limited(limit)

    def _run_limited(self, bytes_per_s: float) -> None:
        """Measure the throughput during writes of a session with `write_limit`."""
        os.environ[CHECKPOINT_WRITE_LIMIT] = str(max(1, round(bytes_per_s)))
        self._program.facts["write_limit"] = round(bytes_per_s)
        self._ours = Ours(self._program, self._trained, folder="limited")
        self._ours.try_out()
        for pair in range(min(LIMITED_PAIRS, self._program.settings["pairs"])):
            if pair and not self._program.is_time_left():
                break
            self._save_beside_products(self._ours, LIMITED)
        self._ours.close()

    def _ways(self) -> list[tuple[Overlapped, str]]:
        peer = [] if self._peer is None else [(self._peer, f"{PEER}.")]
        return [(self._ours, ""), *peer]

    def _open_peer(self) -> TorchCheckpointing | None:
        """Return torch_checkpointing, after its first save, or None if it is not installed."""
        found, problem = installed_version(), ""
        self._program.facts |= {PEER: found, "peer_problem": problem}
        if found is None:
            return None
        try:
            peer = TorchCheckpointing(self._program, self._trained, self._program.directory)
            peer.begin()
            peer.wait_for_copy()
            peer.wait_until_written()
        except Exception as error:
            # It may not work on this machine, for example with little shared memory. Holdfast is
            # measured all the same, and the result says why the peer is not.
            problem = f"{PEER} {found} cannot save here: {type(error).__name__}: {error}"
            self._program.facts |= {PEER: None, "peer_problem": problem}
        if self._program.slowest(float(bool(problem))):
            self._program.facts[PEER] = None
            return None
        peer.end()
        return peer

    def _save_beside_a_wait(self, way: Overlapped, prefix: str) -> None:
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        step_s = STEP_COPIES * memcpy.seconds
        self._prepare(way)
        blocked, used = timed(way.begin)
        time.sleep(step_s)
        waited, used_later = timed(way.wait_for_copy)
        way.end()
        memcpy.measure()
        self._note(
            prefix,
            memcpy=memcpy.seconds,
            blocked=self._program.slowest(blocked + waited),
            blocked_cpu=self._program.slowest(used + used_later),
        )

    def _save_beside_products(self, way: Overlapped, prefix: str) -> None:
        """Time a step beside the copy, then count products until the checkpoint is written."""
        memcpy = Memcpy(self._program, self._image)
        memcpy.measure()
        count = max(1, round(STEP_COPIES * memcpy.seconds / self._product_s))
        before = self._program.measure(lambda: self._products.multiply(count))
        self._prepare(way)
        way.begin()
        during = self._program.measure(lambda: self._products.multiply(count))
        way.wait_for_copy()
        each_s = self._products.seconds_until(lambda: way.is_written)
        way.end()
        after = self._program.measure(lambda: self._products.multiply(count))
        alone = (before + after) / 2
        self._note(prefix, step_alone=alone, step_during_copy=during)
        self._note(prefix, product_alone=alone / count, product_during_write=each_s)

    def _prepare(self, way: Overlapped) -> None:
        """Change the state, and let all ranks begin the save together."""
        self._trained.update()
        ready_pages(self._bytes)
        if way is self._ours:
            self._ours.ask()
        self._program.meet()

    def _note(self, prefix: str, **found: float) -> None:
        self._program.note(**{f"{prefix}{name}": value for name, value in found.items()})


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of an act, and the CPU seconds of this thread."""
    began, used = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - began, time.thread_time() - used


def main() -> None:
    program = Program()
    Overlap(program).run()
    program.finish()


if __name__ == "__main__":
    main()
