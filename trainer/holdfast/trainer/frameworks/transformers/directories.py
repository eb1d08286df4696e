"""The trainer's own directories `checkpoint-N`, which Holdfast's trainer writes without state.

A program may pass the newest one to `train`, as published examples do. If a launch wrote one and
ended before the checkpoint of its step was committed, this directory has no state to begin with.
So each has a mark that names its run, and a relaunch of the run then begins as its first launch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from transformers.trainer_utils import sort_checkpoints

from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes

TRAINER_STATE: Final = "trainer_state.json"
# A directory with a training state has these. One that Holdfast's trainer wrote has only the first.
WHOLE: Final = (TRAINER_STATE, "scheduler.pt")
MARK: Final = "holdfast.json"


def begin_with(given: str | bool | None, output_dir: str, run: Path) -> str | None:
    """Return the directory to begin with, "" if there must be one and is none, or None.

    `given` is `resume_from_checkpoint`. What the run with folder `run` wrote counts as none.
    """
    if not given:
        return None
    there = sort_checkpoints(output_dir)
    whole = [path for path in there if not missing_files(path)]
    newest = whole[-1] if whole else None
    if given is not True:
        path = os.fspath(given)
        return newest if is_marked(path, run) else path
    has_own = any(is_marked(path, run) for path in there)
    return newest if newest or has_own else ""


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


def _mark_of(run: Path) -> bytes:
    return to_json({"run": str(run)})


def step_of(path: str | None) -> int:
    """Return the step of a directory of Transformers, or 0 without one."""
    state = Path(path or "") / TRAINER_STATE
    if not path or not state.exists():
        return 0
    return int(json.loads(state.read_bytes())["global_step"])
