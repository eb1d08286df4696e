"""A session for programs whose framework saves and reads its own files.

All of `Session` works: stop agreement, cadence, data order, metrics, journal, commit, mirror. The
checkpoints have the framework's files, which only the framework reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.damage import describe_problems, find_problems
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.environment import FLUSH_TIMEOUT_DEFAULT_S as SAVE_TIMEOUT_S
from holdfast.contracts.errors import DamagedCheckpointError, PreflightError, SaveError
from holdfast.contracts.node.rank_status import Phase
from holdfast.trainer.arguments import check_best, check_kinds, check_seed
from holdfast.trainer.planning.layout import FILE_ALIGNMENT, Layout, add_train_state, align
from holdfast.trainer.planning.ranks import all_or_none, check_memory
from holdfast.trainer.planning.signature import Signature
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.saving.late import AT_ONCE, Overlap
from holdfast.trainer.saving.saver import PlanStatus, Saver
from holdfast.trainer.session.lifetime import claimed
from holdfast.trainer.session.session import Session
from holdfast.trainer.session.settings import Settings
from holdfast.trainer.slots.slot_table import FilePlace
from holdfast.trainer.staging.file_writers import SlotOutput, Writer, measure
from holdfast.trainer.staging.stage import Stage, StagedSlot
from holdfast.trainer.state.file_state import FileState, Framework
from holdfast.trainer.state.optimizer_steps import OptimizerSteps
from holdfast.trainer.state.run_state import Restored

# A checkpoint engine for programs whose framework serialises its own files.
#
# A save hands over whole files instead of tensors. Each rank writes its files into a staging
# slot, and the node's flusher does the rest, as for tensors. The ranks plan nothing together.
# Only the sizes of a rank's slots depend on its files, and they grow when its files do.

# Space for files that become a little longer from save to save, such as histories.
GROWTH: Final = 1.02
GROWTH_BYTES: Final = 1 << 20


class FileEngine(CheckpointEngine):
    """One rank's saves of files. A state maps paths in the checkpoint to their writers.

    Ranks must not write the same path. There are no snapshots.
    """

    def prepare(self, state: dict[str, Any], *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Allocate slots for files like those of `state`. All ranks call this together.

        Raises `SaveError` on all ranks if one has not enough memory.
        """
        tree, _ = self._trees
        who = self._identity
        layout = all_or_none(tree, who.rank, lambda: self._fit(state, timeout_s))
        check_memory(tree, who.node, layout.image_bytes, self.connection.staging)
        all_or_none(tree, who.rank, lambda: self._open(layout))

    def changes(self, state: dict[str, Any]) -> str | None:
        """Return None: a save needs no common plan, and allocates larger slots if needed."""
        return None

    def save(
        self,
        state: dict[str, Any],
        train_state: Mapping[str, Any] | None,
        *,
        timeout_s: float = SAVE_TIMEOUT_S,
        continuing: Overlap = AT_ONCE,
        **facts: Any,
    ) -> str:
        """Stage the files of `state`: see `CheckpointEngine.save`. No copy continues."""
        try:
            return super().save(state, train_state, timeout_s=timeout_s, **facts)
        except _FullError:
            # This rank's files have grown. It needs no other rank to replace its slots.
            self._open(self._fit(state, timeout_s))
            return super().save(state, train_state, timeout_s=timeout_s, **facts)

    def snapshot(self, state: dict[str, Any], train_state: Mapping[str, Any], **facts: Any) -> bool:
        """Return False: the framework may need all ranks to collect its state."""
        return False

    def _planned(self, state: dict[str, Any], timeout_s: float) -> tuple[Stage, Mapping[str, Any]]:
        if self._stage is None:
            self._open(self._fit(state, timeout_s))
        assert self._stage is not None
        return self._stage, state

    def _fit(self, state: Mapping[str, Writer], timeout_s: float) -> Layout:
        """Return a layout with space for the files of `state`, once all older saves are written."""
        self._release_old_stage(timeout_s)
        sizes = [measure(write) for write in state.values()]
        self._tensor_bytes = sum(sizes)
        space = sum(align(int(size * GROWTH), FILE_ALIGNMENT) for size in sizes) + GROWTH_BYTES
        layout = Layout(
            signature=Signature({}),
            tensors=(),
            numbers=(),
            fixed=(),
            files=(),
            image_bytes=align(space, FILE_ALIGNMENT),
        )
        return add_train_state(layout) if self._identity.rank == 0 else layout

    def _open(self, layout: Layout) -> None:
        self._stage = Stage(self.connection, layout, device=None)
        who = self._identity
        assert self._run is not None
        self.connection.describe(layout, self._run.attempt(who.attempt).launch(who.launch))
        self._layout = layout

    def _write(
        self,
        staged: StagedSlot,
        flat: Mapping[str, Any],
        document: bytes | None,
        continuing: Overlap,
    ) -> tuple[Layout, None]:
        """Write all files into the slot. Return the layout, with the places of the files."""
        assert self._layout is not None
        places, at = [], 0
        room = self._layout.used_bytes
        for path, write in flat.items():
            output = SlotOutput(staged.slot, at, room)
            write(output)
            if output.problem is not None:
                raise SaveError(f"{path} cannot be staged: {output.problem.strerror}")
            places.append(FilePlace(path, at, output.tell()))
            at = align(at + output.tell(), FILE_ALIGNMENT)
        if places and places[-1].offset + places[-1].bytes > room:
            raise _FullError(f"{at} bytes of files do not fit into {room} bytes")
        self._tensor_bytes = sum(place.bytes for place in places)
        staged.fill({}, document)
        return replace(self._layout, files=tuple(places)), None


class _FullError(SaveError):
    """The files are longer than the slot."""


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
        with claimed(self, self._abandon):
            self._join(directory, None)
            state = FileState(framework, self._ranks)
            saver = partial(FileSaver, staging=settings.staging)
            found = self._restore(state, saver, partial(self._load, state))
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
