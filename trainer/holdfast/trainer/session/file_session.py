"""A session for programs whose framework saves and reads its own files.

All of `Session` works: stop agreement, cadence, data order, metrics, journal, commit, mirror. The
checkpoints have the framework's files, which only the framework reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.damage import describe_problems, find_problems
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.errors import DamagedCheckpointError, PreflightError
from holdfast.contracts.node.rank_status import Phase
from holdfast.trainer.arguments import check_best, check_kinds, check_seed
from holdfast.trainer.saving.file_engine import FileEngine
from holdfast.trainer.saving.saver import PlanStatus, Saver
from holdfast.trainer.session import alone
from holdfast.trainer.session.session import Session
from holdfast.trainer.session.settings import Settings
from holdfast.trainer.state.file_state import FileState, Framework
from holdfast.trainer.state.optimizer_steps import OptimizerSteps
from holdfast.trainer.state.run_state import Restored


class FileSaver(Saver):
    """Saves files. The framework collects them at a save only, because that may be expensive."""

    engine_class = FileEngine

    def begin(self, *, awaits_state: bool) -> None:
        """Allocate slots before the first step of a resumed run. A new run does it after it."""
        if not awaits_state:
            self.prepare()

    def look(self) -> PlanStatus:
        """Return that every state fits: see `FileEngine.changes`."""
        return PlanStatus.FITS


class FileSession(Session):
    """A `Session` without tensors of its own. An adapter gives it a `Framework`."""

    def __init__(
        self,
        framework: Framework,
        *,
        seed: int = 0,
        interval: int | str | None = None,
        directory: str | Path | None = None,
        best: tuple[str, str] | None = None,
    ) -> None:
        """Resumes from the newest checkpoint that verifies: see `Session`.

        Raises also `PreflightError` with a node-local tier, because a framework reads the files of
        all ranks.
        """
        check_best(best)
        check_kinds(mesh=None, planner=None, directory=directory)
        settings = Settings.without_snapshots(interval, framework.name)
        if local := Tiers.from_environment(os.environ).local:
            raise PreflightError(
                f"checkpoint.local is {local!r}, and {framework.name} reads files of other nodes. "
                "Remove checkpoint.local from the spec"
            )
        self.seed, self._best_of = check_seed(seed), (best[0], best[1]) if best else None
        self._optimizers, self._made_with = OptimizerSteps.unknown(), {}
        with alone.claimed(self, self._abandon):
            self._join(directory, None)
            state = FileState(framework, self._ranks)
            found = self._restore(state, FileSaver, partial(self._load, state))
            self._start(found, settings)

    def _load(
        self, state: FileState, directory: Path, manifest: Manifest, document: Mapping[str, Any]
    ) -> tuple[list[Restored], Sequence[str]]:
        """Verify every byte, each rank a share, then let the framework read the files.

        All ranks raise `DamagedCheckpointError` if a file differs from the manifest.
        """
        ranks, share = self._ranks, (self._ranks.rank, self._ranks.world_size)

        def beat(_: int) -> None:
            self._record.beat(Phase.LOAD)

        shares = ranks.gather(
            lambda: find_problems(directory, manifest, progress=beat, share=share)
        )
        if damage := describe_problems(manifest, shares):
            raise DamagedCheckpointError(
                f"{directory}: {'; '.join(damage)}; resume from another checkpoint", damaged=damage
            )
        scratch = self._context.run.converted
        restored, notes = state.load(directory, document, scratch)
        return ranks.gather(lambda: restored), notes
