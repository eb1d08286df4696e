"""Check whether a run can continue from its newest checkpoint at another number of GPUs.

Reads only the manifest, so it is quick and needs no torch. `holdfast doctor --run` also reports
the memory needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.errors import HoldfastError, NotFoundError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.checkpoint_choice import newest_of_branch
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.topology import SavedTopology, problem_with_mesh


@dataclass(frozen=True)
class Feasibility:
    """The GPU counts at which a run can continue; `newest` is None without a checkpoint.

    `ranks` returns the world size at a GPU count, see `RunSpec.ranks`.
    """

    newest: SavedTopology | None
    ranks: Callable[[int], int]

    @classmethod
    def of(cls, history: RunHistory) -> Feasibility:
        """Return the feasibility of a run now, from the checkpoint that it resumes from.

        That is its branch's newest committed checkpoint. A fork without one begins from its
        parent's.
        """
        try:
            return cls(newest_of_branch(history.paths, history), history.spec.ranks)
        # What the run would resume from. Rolled-back and damaged checkpoints are passed over there
        # too.
        except NotFoundError:
            return cls(_forked_checkpoint(history), history.spec.ranks)

    def allows(self, gpus: int) -> bool:
        """Return False if it is known that `gpus` GPUs cannot hold the state."""
        return self.problem(gpus) is None

    def problem(self, gpus: int) -> str | None:
        """Return why `gpus` GPUs cannot hold the state, and which can; None if they can or may."""
        if self.newest is None:
            return None
        try:
            problem = problem_with_mesh(self.newest, self.ranks(gpus))
        except ValueError as error:
            return str(error)
        return f"its checkpoint {self.newest.name}: {problem}" if problem else None

    def doubt(self, gpus: int) -> str | None:
        """Return why it is unknown whether `gpus` GPUs can hold the state; None if it is known."""
        # The manifest of an imported checkpoint may have no mesh.
        if self.newest is None or "mesh" in self.newest.topology:
            return None
        if self.ranks(gpus) == self.newest.world_size:
            return None
        return (
            f"its checkpoint {self.newest.name} does not record its mesh, so whether it fits "
            f"{counted(gpus, 'GPU')} shows only when it is loaded"
        )


def _forked_checkpoint(history: RunHistory) -> Manifest | None:
    """Return the checkpoint that a run was forked from; None without one that can be read."""
    path = history.record.forked_path
    # It may be another user's.
    with contextlib.suppress(HoldfastError, OSError):
        return read_manifest(Path(path)) if path else None
    return None
