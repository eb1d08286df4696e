"""Whether a run can go on from its newest checkpoint at another number of GPUs, before it queues.

Told by the manifest alone, so that it costs a look at the disk and needs no torch; `holdfast doctor
--run` says besides how much memory it takes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from holdfast.contracts.errors import DamagedCheckpointError, NotFoundError
from holdfast.contracts.history import RunHistory, excluded_checkpoints
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.topology import has_mesh, problem_with_mesh


@dataclass(frozen=True)
class Feasibility:
    """What is known of the shapes a run can go on in; `newest` is None without a checkpoint."""

    newest: Manifest | None

    @classmethod
    def of(cls, history: RunHistory) -> Feasibility:
        """Of the run as it is now: its branch's newest committed checkpoint counts."""
        try:
            return cls(newest_of_branch(history.paths, history))
        except NotFoundError:
            return cls(None)

    def allows(self, gpus: int) -> bool:
        """False when it is known that `gpus` cannot hold the state."""
        return self.problem(gpus) is None

    def problem(self, gpus: int) -> str | None:
        """Why `gpus` cannot hold the state, and what can; None when they can or nobody knows."""
        if self.newest is None:
            return None
        problem = problem_with_mesh(self.newest, gpus)
        return f"its checkpoint {self.newest.name}: {problem}" if problem else None

    def doubt(self, gpus: int) -> str | None:
        """Why it is not known whether `gpus` can hold the state; None when it is."""
        if self.newest is None or has_mesh(self.newest) or gpus == self.newest.world_size:
            return None
        return (
            f"its checkpoint {self.newest.name} does not say over which mesh it was saved, so "
            f"whether it fits {gpus} GPUs is seen only when it is loaded"
        )


def newest_of_branch(paths: RunPaths, history: RunHistory) -> Manifest:
    """The newest committed checkpoint that no rollback excluded. Raises `NotFoundError`."""
    excluded = excluded_checkpoints(history.events)
    for directory in reversed(paths.list_checkpoints()):
        with contextlib.suppress(DamagedCheckpointError):
            manifest = None if directory.name in excluded else read_manifest(directory)
            if manifest is not None:
                return manifest
    raise NotFoundError(
        f"{paths.name} has no committed checkpoint yet; ask again after its first save"
    )
