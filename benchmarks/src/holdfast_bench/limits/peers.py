"""torch_checkpointing, whose saves also return before their copy is complete.

`infra/setup/bench_peers.sh` installs it into a folder of the checkout, because nothing else needs
it. Its class for loads at another rank count needs CUDA, so the state is saved without it. Its
direct writes fail on ext4, so they are off. It does not call fsync.
"""

from __future__ import annotations

import itertools
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from holdfast_bench.limits.figures import PEER
from holdfast_bench.limits.files import remove
from holdfast_bench.limits.ranks import Program, Trained

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
    """Saves of the live state of a program, as torch_checkpointing's tutorial makes them."""

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
