"""Checkpoints by a word instead of a whole name: `latest`, `best` and `step-3000`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import LATEST, MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError, NotFoundError
from holdfast.contracts.records import known_damage, reported
from holdfast.contracts.records.history import RunHistory, excluded_checkpoints, load_history
from holdfast.contracts.spec.keep_rules import ranked

BEST: Final = "best"
_STEP: Final = re.compile(r"step-([0-9]{1,18})")
STEPS_SHOWN: Final = 3


def is_checkpoint(word: str) -> bool:
    """Return whether `word` may follow a run's name in the id of a checkpoint."""
    is_word = word in {LATEST, BEST} or _STEP.fullmatch(word) is not None
    return is_word or CheckpointName.parse(word) is not None


def choose_checkpoint(paths: RunPaths, word: str) -> str:
    """Return the directory name of the checkpoint that `word` means in a run.

    A whole name is returned unchanged, even if there is no such checkpoint. `latest` is the one
    that the run would resume from, and `best` the first by the spec's `checkpoint.keep.best`. Of
    several with the step of `step-3000`, the newest on the run's branch is meant.
    Raises `NotFoundError` if the run has no such checkpoint.
    """
    if word == LATEST:
        return newest_of_branch(paths, load_history(paths)).name
    if word == BEST:
        return _best(paths)
    if (step := _STEP.fullmatch(word)) and not CheckpointName.parse(word):
        return _of_step(paths, int(step[1]))
    return word


def newest_of_branch(paths: RunPaths, history: RunHistory) -> Manifest:
    """Return the newest committed checkpoint of the run's branch. Raises `NotFoundError`."""
    for manifest in branch_of(paths, history):
        return manifest
    raise NotFoundError(
        f"{paths.name} has no committed checkpoint yet; repeat the command after its first save"
    )


def branch_of(paths: RunPaths, history: RunHistory) -> Iterator[Manifest]:
    """Yield the committed checkpoints of the run's branch, newest first, without damaged ones."""
    # Commands must not name a checkpoint that a load would refuse, see decision 91.
    excluded = {
        *excluded_checkpoints(history.events),
        *known_damage.damaged_checkpoints(history.events),
    }
    for directory in reversed(paths.list_checkpoints()):
        with contextlib.suppress(DamagedCheckpointError):
            manifest = None if directory.name in excluded else read_manifest(directory)
            if manifest is not None:
                yield manifest


def _best(paths: RunPaths) -> str:
    history = load_history(paths)
    rule = history.spec.checkpoint.keep.best
    if rule is None:
        raise NotFoundError(
            f"{paths.name}:{BEST}: the run's spec has no checkpoint.keep.best, so no metric says "
            f"which is best; `holdfast checkpoints {paths.name} --best METRIC` sorts by one"
        )
    branch = reported.with_reported(branch_of(paths, history), history.events)[::-1]
    found = ranked(branch, rule.metric, rule.mode)
    if not found:
        raise NotFoundError(
            f"{paths.name}:{BEST}: no committed checkpoint has the metric {rule.metric!r} of "
            f"checkpoint.keep.best; `holdfast checkpoints {paths.name} --json` shows the metrics"
        )
    return found[0][1]


def _of_step(paths: RunPaths, step: int) -> str:
    there = [name for one in paths.list_checkpoints() if (name := CheckpointName.parse(one.name))]
    found = [str(name) for name in there if name.step == step]
    if not found:
        near = sorted({name.step for name in there}, key=lambda one: abs(one - step))[:STEPS_SHOWN]
        listed = ", ".join(map(str, sorted(near))) or "none"
        raise NotFoundError(
            f"{paths.name} has no checkpoint of step {step}; the nearest steps: {listed}; "
            f"`holdfast checkpoints {paths.name}` lists all"
        )
    excluded = excluded_checkpoints(load_history(paths).events)
    # A committed one precedes an unfinished save, and the run's branch what was rolled back.
    return max(
        found, key=lambda one: (_is_committed(paths, one), one not in excluded, found.index(one))
    )


def _is_committed(paths: RunPaths, name: str) -> bool:
    """Return whether a checkpoint is committed: it has a manifest."""
    return os.path.lexists(paths.checkpoints / name / MANIFEST)
