"""Resume of a session: rank 0 chooses, all ranks load, and one line reports what was restored."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.filesystems import is_listed
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import (
    MANIFEST,
    checkpoint_id,
)
from holdfast.contracts.disk.reading import read_again
from holdfast.contracts.errors import (
    CheckpointError,
    DamagedCheckpointError,
    KeyMismatchError,
)
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.history import load_events
from holdfast.trainer.data.order import SkipWindow, joined, parse_skips
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.loading.preparation import Preparation
from holdfast.trainer.loading.reader import load_state, open_together
from holdfast.trainer.loading.resume import Search
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.planning.train_state_file import read_train_state
from holdfast.trainer.process.program import program_argv
from holdfast.trainer.process.standby import changed_variables
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.state.run_state import FRAMEWORK, PROGRAM, Restored
from holdfast.trainer.state.train_state import TrainState

# Loads the checkpoint in a directory, with its manifest and train state. Returns what each rank
# restored, and notes for people. All ranks raise `DamagedCheckpointError` if it is damaged.
Load = Callable[[Path, Manifest, Mapping[str, Any]], tuple[list[Restored], Sequence[str]]]

CHOICES_MAX: Final = 100
FALLBACKS_MAX: Final = 100


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The resumed position: training continues after `step`. `checkpoint` is an id, or None.

    `epoch` and `in_epoch` are as in `TrainingProgress`.
    """

    step: int = 0
    checkpoint: str | None = None
    manifest: Manifest | None = None
    epoch: int = 0
    in_epoch: bool = False
    skips: tuple[SkipWindow, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Choice:
    """Rank 0's choice, sent to the other ranks. Only rank 0 reads the manifest."""

    directory: str | None
    manifest: Manifest | None
    checkpoint: str | None
    skipped: tuple[str, ...]
    skips: tuple[SkipWindow, ...]
    document: dict[str, Any]


def resume(
    context: RankContext,
    ranks: ControlGroup,
    load: Load,
    recorder: Recorder,
    *,
    start_from: Path | None = None,
    begins_at: int = 0,
) -> Resumed:
    """Restore the run's newest checkpoint that verifies. Every rank must call this.

    A run without a checkpoint restores `start_from`, the directory of another run's checkpoint.
    Without both, training continues after step `begins_at`.
    A checkpoint that turns out damaged while it is read is skipped by all ranks together. Raises
    `CheckpointError` if the checkpoint does not fit the program's state, and
    `DamagedCheckpointError` if one was read in part and there is none to fall back to.
    """
    passed: dict[str, str] = {}
    began = time.monotonic()
    tiers = Tiers.from_environment(os.environ)
    prepared = Preparation(context.identity, ranks, tiers)
    search = Search(
        run=context.run,
        run_uid=context.identity.run_uid,
        tiers=tiers,
        nodes=context.identity.nodes,
        passed=passed,
        journal=recorder.event,
        find=prepared.verify,
        fetch=prepared.fetch,
        start_from=start_from,
    )
    for _ in range(FALLBACKS_MAX):
        # Rank 0's lease protects the checkpoint from deletion until all ranks have loaded it.
        with contextlib.ExitStack() as held:
            choice = prepared.lead(partial(_choose, search, passed, held))
            try:
                found, restored, notes = _restore(choice, load, begins_at)
            except DamagedCheckpointError as error:
                if choice.directory is None:
                    raise
                passed[choice.directory] = f"damaged: {'; '.join(error.damaged) or error}"
                continue
        if ranks.rank == 0:
            load_s = round(time.monotonic() - began, 6)
            _report(context, found, restored, choice.skipped, notes, load_s, recorder)
        return found
    raise DamagedCheckpointError(
        f"{context.run.directory}: all checkpoints that were read are damaged ({len(passed)}); "
        "check the storage with `holdfast verify`",
        damaged=[f"{Path(path).name}: {problem}" for path, problem in passed.items()],
    )


def _report(
    context: RankContext,
    found: Resumed,
    restored: list[Restored],
    skipped: tuple[str, ...],
    notes: Sequence[str],
    load_s: float,
    recorder: Recorder,
) -> None:
    """Print and journal what was restored."""
    report(describe(context.run.name, found, restored, skipped, notes))
    recorder.event(
        EventKind.RESUMED,
        checkpoint=found.checkpoint,
        step=found.step,
        skipped=list(skipped),
        command_digest=context.identity.command_digest,
        argv=program_argv(),
        world_size=context.identity.world_size,
        restored=list(restored[0].parts),
        notes=list(notes),
        load_s=load_s,
        changed_variables=changed_variables(),
    )


def load_tensors(
    ranks: ControlGroup,
    state: TrainState,
    directory: Path,
    manifest: Manifest,
    document: Mapping[str, Any],
) -> tuple[list[Restored], Sequence[str]]:
    """Load a checkpoint in the format of DCP into `state`: see `Load`. Every rank calls this.

    Raises `CheckpointError` if another framework wrote it.
    """
    if framework := document.get(FRAMEWORK):
        raise CheckpointError(
            f"{directory}: {framework} wrote this checkpoint, in files of its own, and this "
            f"program uses Session. Use the session of {framework}, or begin another run"
        )
    return load_opened(ranks, state, open_together(directory, ranks.group, manifest), document)


def load_opened(
    ranks: ControlGroup, state: TrainState, opened: Opened, document: Mapping[str, Any]
) -> tuple[list[Restored], Sequence[str]]:
    """Load an open checkpoint into `state`, without the excluded parts that do not fit."""
    while True:
        target = state.template(document, lambda: opened.metadata)
        fit = state.fit_for(document)
        try:
            report = load_state(
                opened,
                target,
                group=ranks.group,
                strict=fit.strict,
                rename=fit.rename,
                exclude=fit.exclude,
                # A part that was removed from the program may be in no later checkpoint.
                knows_names=False,
            )
            break
        except KeyMismatchError as error:
            if not state.leaves_out(error, document):
                raise
    return ranks.gather(lambda: state.apply(target, document)), report.notes()


def _restore(
    choice: _Choice, load: Load, begins_at: int
) -> tuple[Resumed, list[Restored], Sequence[str]]:
    """Load the chosen checkpoint, if there is one.

    Returns the resumed position, what each rank restored, and the notes of the load.
    """
    found = Resumed(step=begins_at, skips=choice.skips)
    restored: list[Restored] = [Restored(parts=())]
    notes: Sequence[str] = ()
    if choice.directory is not None and choice.manifest is not None:
        document = choice.document
        restored, notes = load(Path(choice.directory), choice.manifest, document)
        found = Resumed(
            step=int(document["step"]),
            checkpoint=choice.checkpoint,
            manifest=choice.manifest,
            epoch=int(document["epoch"]),
            in_epoch=bool(document.get("in_epoch", False)),
            skips=choice.skips,
            data=dict(document["data"]),
            best=dict(document["best"]),
            program=dict(document.get(PROGRAM, {})),
        )
    return found, restored, notes


def describe(
    run: str,
    found: Resumed,
    restored: list[Restored],
    skipped: tuple[str, ...],
    loaded: Sequence[str] = (),
) -> str:
    """Return the line for people about what was restored and what was not.

    `restored` is by rank. `loaded` are the notes of the load about single keys.
    """
    over = f"; skipped {'; '.join(skipped)}" if skipped else ""
    if found.checkpoint is None:
        return (
            f"holdfast: {run} begins at step {found.step}: there is no checkpoint to resume from"
            f"{over}"
        )
    first = restored[0]
    reseeded = [str(rank) for rank, one in enumerate(restored) if one.reseeded]
    notes = [f"{name} was not in the checkpoint" for name in first.missing]
    notes += [f"the checkpoint's {name} is not used" for name in first.unused]
    notes += first.refused
    if reseeded:
        notes.append(
            f"ranks {', '.join(reseeded)} had no saved random state and were seeded from "
            "(seed, rank, step)"
        )
    notes += loaded
    not_restored = f"; {'; '.join(notes)}" if notes else ""
    return (
        f"holdfast: {run} continues after step {found.step} from {found.checkpoint}: restored "
        f"{', '.join(first.parts)}{not_restored}{over}"
    )


def recorded_skips(events: Iterable[Event]) -> tuple[SkipWindow, ...]:
    """Return the windows of skipped data: `skip` of each event, pairs [first_step, steps]."""
    return parse_skips(
        pair
        for event in events
        if event.kind in {EventKind.ROLLED_BACK, EventKind.NUMERICS}
        for pair in event.data.get("skip") or ()
    )


def _choose(search: Search, passed: dict[str, str], held: contextlib.ExitStack) -> _Choice:
    """Choose a checkpoint under a lease. If it was deleted before the lease, choose again.

    `passed` maps skipped directories to the reason. A checkpoint with a damaged train state is
    added.
    """
    skips = recorded_skips(load_events(search.run))
    read_before = bool(passed)
    for _ in range(CHOICES_MAX):
        choice = search.choose()
        if choice.directory is None or choice.manifest is None:
            break
        held.enter_context(reading(choice.directory))
        if _is_gone(choice.directory / MANIFEST):
            continue
        try:
            document = read_train_state(choice.directory, choice.manifest)
        except DamagedCheckpointError as error:
            passed[str(choice.directory)] = f"damaged: {'; '.join(error.damaged)}"
            continue
        name = checkpoint_id(choice.manifest.run, choice.manifest.name)
        # Only the checkpoint has the skip windows of the run from which this run was forked.
        skips = joined(skips, document.get("data", {}).get("skips", ()))
        directory = str(choice.directory)
        return _Choice(directory, choice.manifest, name, choice.skipped, skips, document)
    if read_before:
        raise DamagedCheckpointError(
            f"{search.run.directory}: no checkpoint is whole, and the newest was read in part, so "
            f"the state of this process is incomplete. Skipped: {'; '.join(choice.skipped)}. "
            "Restore one from a copy, or fork a checkpoint of another run",
            damaged=choice.skipped,
        )
    return _Choice(None, None, None, choice.skipped, skips, {})


def _is_gone(manifest: Path) -> bool:
    """Return True if the manifest was deleted since. The load reports other storage errors."""
    try:
        return not read_again(lambda: is_listed(manifest))
    except OSError:
        return False
