"""The files of `ModelCheckpoint`, which stay Lightning's own files.

A save of `ModelCheckpoint` is staged in memory, and the flusher writes the file. A file that the
program itself saves is there when `trainer.save_checkpoint` returns.

A resume never reads them. Programs read them: `trainer.test(ckpt_path="best")`,
`load_from_checkpoint`. So the choice of the best file must survive a crash, after which training
continues from an earlier step than the files show:

- A file is deleted only when a committed checkpoint no longer refers to it. Otherwise the best
  model of the restored state would be gone.
- A file that was written after the restored step is written again under its own name. Otherwise
  the same step would get a second file, with `-v1` in its name.
- The folder stays that of the run's first launch. Loggers choose a new one for each process, and
  `ModelCheckpoint` then forgets its best score.
- If the program itself names another folder at each launch, as with Hydra, new files are written
  there. The best score and the files of earlier launches stay known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from holdfast.contracts.node.reporting import report
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.staging.file_writers import torch_writer

# Paths in the order in which they were written, one JSON line each, in the run's folder.
WRITTEN: Final = "lightning-files.jsonl"


class StrategyFiles:
    """The files that the strategy of one trainer writes and deletes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._strategy = trainer, trainer.strategy
        self._record: Path | None = None
        self._session: FrameworkSession | None = None
        # Whether `ModelCheckpoint` is saving.
        self._is_scheduled = False
        self._written = 0
        # Files of steps that run again, the same on all ranks.
        self._lost: set[str] = set()
        # Deletions that `ModelCheckpoint` asked for, oldest first. None: the name is in use again.
        self._unwanted: list[str | None] = []
        self._deleted = 0
        # How many of these deletions a checkpoint contains, by its step.
        self._covered: dict[int, int] = {}
        # The states of callbacks in the restored checkpoint.
        self._callbacks: Mapping[str, Any] = {}
        # The folders that loggers chose for this launch.
        self._new_folders: list[Any] = []
        self._without_folder = [each for each in model_checkpoints(trainer) if each.dirpath is None]
        self._save, self._remove = self._strategy.save_checkpoint, self._strategy.remove_checkpoint
        self._strategy.save_checkpoint = self._write
        self._strategy.remove_checkpoint = self._ask_to_remove
        self._io = self._strategy.checkpoint_io
        self._save_now = self._io.save_checkpoint
        # A plugin of the program's own decides itself where and how it writes.
        if type(self._io) is TorchCheckpointIO:
            self._io.save_checkpoint = self._write_content
        for each in model_checkpoints(trainer):
            each.file_exists = partial(self._exists, each.file_exists)
            # A subclass may use the file right after its save.
            if type(each)._save_checkpoint is ModelCheckpoint._save_checkpoint:
                each._save_checkpoint = partial(self._save_scheduled, each._save_checkpoint)

    def open(self, session: FrameworkSession) -> None:
        """Keep the record of written files in the run's folder, after the state is restored."""
        self._session, self._record = session, session.run_directory / WRITTEN
        recorded = _read(self._record) if self._trainer.is_global_zero else []
        lost = self._lost | set(recorded[self._written :])
        self._lost, self._written = self._strategy.broadcast((lost, len(recorded)))
        if not (session.resumed_from or "").startswith(f"{session.run_directory.name}:"):
            # A fork has another folder. Lightning deletes nothing outside of it.
            for each, folder in zip(self._without_folder, self._new_folders, strict=False):
                each.dirpath = folder
        self._keep_scores()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs to know of the files that exist now."""
        return {
            "written": self._written,
            "lost": sorted(self._lost),
            "unwanted": [path for path in self._unwanted[self._deleted :] if path is not None],
        }

    def load_state_dict(self, state: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
        """Restore the record, and the folders that the states of the `callbacks` contain."""
        self._written, self._lost = state["written"], set(state["lost"])
        self._unwanted, self._deleted = list(state["unwanted"]), 0
        self._callbacks = callbacks
        self._new_folders = [each.dirpath for each in self._without_folder]
        for each in self._without_folder:
            each.dirpath = callbacks.get(each.state_key, {}).get("dirpath", each.dirpath)

    def cover(self, step: int) -> None:
        """Note which deletions the state contains that is captured after `step`."""
        # An earlier state of the same step may be the one that gets committed.
        self._covered.setdefault(step, len(self._unwanted))

    def remove(self, committed: int) -> None:
        """Delete the files that the committed checkpoint of step `committed` no longer needs."""
        steps = [step for step in self._covered if step <= committed]
        self._remove_until(max((self._covered.pop(step) for step in steps), default=0))

    def close(self) -> None:
        """After the end of the session, delete all files that are no longer needed.

        The rest is left to Lightning.
        """
        self._session = None
        self._remove_until(len(self._unwanted))
        self._io.save_checkpoint = self._save_now
        self._strategy.save_checkpoint, self._strategy.remove_checkpoint = self._save, self._remove

    def _keep_scores(self) -> None:
        """Restore what `ModelCheckpoint` forgets if its folder is another one than before."""
        for each in model_checkpoints(self._trainer):
            state = self._callbacks.get(each.state_key)
            if state is None or state["dirpath"] == each.dirpath:
                continue
            folder, each.dirpath = each.dirpath, state["dirpath"]
            each.load_state_dict(state)
            each.dirpath = folder
            if self._trainer.is_global_zero:
                report(
                    f"holdfast: the folder of ModelCheckpoint was {state['dirpath']} and is now "
                    f"{folder}. Its best score and its earlier files are restored all the same"
                )

    def _remove_until(self, count: int) -> None:
        while self._deleted < count:
            path = self._unwanted[self._deleted]
            self._deleted += 1
            if path is not None:
                self._wait_for(path)
                self._remove(path)

    def _ask_to_remove(self, path: Any) -> None:
        self._unwanted.append(str(path))

    def _exists(self, file_exists: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
        """Answer `ModelCheckpoint.file_exists` as if training had never been interrupted."""
        path = str(filepath)
        self._wait_for(path)
        is_free = path in self._lost or path in self._unwanted[self._deleted :]
        return not is_free and file_exists(filepath, trainer)

    def _write(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        path = str(filepath)
        self._lost.discard(path)
        self._unwanted = [
            None if unwanted == path and number >= self._deleted else unwanted
            for number, unwanted in enumerate(self._unwanted)
        ]
        self._written += 1
        if self._record is not None and self._trainer.is_global_zero:
            with self._record.open("a") as stream:
                stream.write(json.dumps(path) + "\n")
        self._save(checkpoint, filepath, storage_options=storage_options)

    def _save_scheduled(self, save: Callable[..., None], *arguments: Any) -> None:
        """Save for `ModelCheckpoint`, in the background if the file is local."""
        self._is_scheduled = True
        try:
            save(*arguments)
        finally:
            self._is_scheduled = False

    def _write_content(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write one file, on rank 0."""
        local = _local_path(path)
        if self._session is None or local is None or not self._is_scheduled or storage_options:
            self._wait_for(path)
            self._save_now(checkpoint, path, storage_options=storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        self._session.write_file(local, torch_writer(checkpoint))

    def _wait_for(self, path: Any) -> None:
        """Wait until the file at `path` is written, on the rank that writes it."""
        local = _local_path(path)
        if self._session is not None and self._trainer.is_global_zero and local is not None:
            self._session.wait_for_files(local)


def _local_path(path: Any) -> Path | None:
    """Return the absolute path of a local file, or None for one in an object store."""
    system = get_filesystem(path)
    is_local = isinstance(system, LocalFileSystem)
    return Path(os.path.abspath(system._strip_protocol(str(path)))) if is_local else None


def _read(path: Path) -> list[str]:
    """Return the recorded paths. A crash may have left the last line incomplete."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def model_checkpoints(trainer: Any) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]
