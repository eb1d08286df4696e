"""The trainer's own directories `checkpoint-N`, which Holdfast's trainer writes without state.

A program may pass the newest one to `train`, as published examples do. If a launch wrote one and
ended before the checkpoint of its step was committed, this directory has no state to begin with.
So each has a mark that names its run, and a relaunch of the run then begins as its first launch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from transformers.trainer_utils import sort_checkpoints

from holdfast.contracts.durable import make_directory, to_json, write_bytes

TRAINER_STATE: Final = "trainer_state.json"
# A directory with a training state has these. One that Holdfast's trainer wrote has only the first.
WHOLE: Final = (TRAINER_STATE, "scheduler.pt")
MARK: Final = "holdfast.json"


def newest_whole(output_dir: str) -> str | None:
    """Return the newest directory in `output_dir` that has a training state, or None."""
    found = [path for path in sort_checkpoints(output_dir) if not missing_files(path)]
    return found[-1] if found else None


def missing_files(path: str) -> list[str]:
    """Return the files of a training state that `path` lacks."""
    return [name for name in WHOLE if not (Path(path) / name).exists()]


def mark(path: Path, run: Path) -> None:
    """Note in the directory, which need not exist, that the run with folder `run` writes it."""
    make_directory(path)
    write_bytes(path / MARK, _mark_of(run))


def is_marked(path: str, run: Path) -> bool:
    """Return whether the run with folder `run` wrote the directory. A damaged mark says no."""
    found = Path(path) / MARK
    return found.exists() and found.read_bytes() == _mark_of(run)


def has_marked(output_dir: str, run: Path) -> bool:
    """Return whether the run with folder `run` wrote a directory in `output_dir`."""
    return any(is_marked(path, run) for path in sort_checkpoints(output_dir))


def _mark_of(run: Path) -> bytes:
    return to_json({"run": str(run)})


def step_of(path: str | None) -> int:
    """Return the step of a directory of Transformers, or 0 without one."""
    state = Path(path or "") / TRAINER_STATE
    if not path or not state.exists():
        return 0
    return int(json.loads(state.read_bytes())["global_step"])
