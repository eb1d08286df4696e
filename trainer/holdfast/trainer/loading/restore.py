"""Resume of a session: rank 0 chooses, all ranks load, and one line reports what was restored."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.damage import find_damage, word_for
from holdfast.contracts.disk.durable import create_bytes
from holdfast.contracts.disk.filesystems import is_listed
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import (
    FETCHING,
    MANIFEST,
    CheckpointName,
    RunPaths,
    checkpoint_id,
)
from holdfast.contracts.disk.reading import read_again
from holdfast.contracts.errors import (
    CheckpointError,
    DamagedCheckpointError,
    KeyMismatchError,
    MirrorError,
)
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.contracts.records.history import excluded_checkpoints, load_events
from holdfast.contracts.records.known_damage import damaged_checkpoints
from holdfast.trainer.data.order import SkipWindow, joined, parse_skips
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.loading.preparation import Preparation
from holdfast.trainer.loading.reader import load_state, open_together
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.mirror.fetch import Remote, newest_remote
from holdfast.trainer.mirror.open_store import open_store
from holdfast.trainer.mirror.upload import Retries
from holdfast.trainer.planning.train_state_file import read_train_state
from holdfast.trainer.process.program import program_argv
from holdfast.trainer.process.standby import changed_variables
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.state.run_state import FRAMEWORK, PROGRAM, Restored
from holdfast.trainer.state.train_state import TrainState

# Resume from the newest checkpoint of the run's folder and the mirror.
#
# A checkpoint that only the mirror has is fetched first: to the run's folder, or to each node's
# disk if there is a node-local tier. It is then loaded like any other. Rank 0 decides. All ranks
# verify and fetch, each a share: see `loading.preparation`.

# The choice of the checkpoint from which a run resumes. Rank 0 chooses, without torch.

Find = Callable[[Path, Manifest], list[str]]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from. `skipped` has a line with the reason for each newer one."""

    directory: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def choose(
    run: RunPaths,
    *,
    verify: bool = False,
    passing_over: Mapping[str, str] | None = None,
    find: Find = find_damage,
    start_from: Path | None = None,
) -> Choice:
    """Return the newest checkpoint of the run's current branch that verifies. Deletes nothing.

    Normally only sizes are compared here, because the load verifies the contents. With `verify`,
    every byte is read. `passing_over` maps directories that turned out damaged to the damage. The
    last remaining candidate is always read, because after a failed load the process cannot start
    over. One that was found damaged before is read too. A run without a checkpoint of its own
    resumes from the checkpoint that it was forked from, or from `start_from`. Raises
    `DamagedCheckpointError` if that one is damaged, because a start from nothing is not what was
    asked for.
    """
    passed = passing_over or {}
    record = read_document(RunRecord, run.spec)
    origin = Path(record.forked_path) if record is not None and record.forked_path else start_from
    uid = record.uid if record is not None else None
    skipped: list[str] = []
    events = load_events(run)
    known = damaged_checkpoints(events)
    candidates = _candidates(run, uid, excluded_checkpoints(events), passed, skipped)
    found = next(candidates, None)
    while found is not None:
        directory, manifest = found
        before = len(skipped)
        following = next(candidates, None)
        is_last = following is None and origin is None
        # If it was found damaged before, its files may have been restored since.
        must_read = verify or is_last or directory.name in known
        damage = find(directory, manifest) if must_read else []
        if not damage:
            return Choice(directory, manifest, tuple(skipped[:before]))
        skipped.insert(before, f"{directory.name}: {_describe(damage)}")
        found = following
    if origin is None:
        return Choice(None, None, tuple(skipped))
    manifest_of_origin, problem = inspect(origin, verify=verify)
    problem = passed.get(str(origin), problem)
    if problem is not None:
        raise DamagedCheckpointError(
            f"{origin}: this run {'starts' if origin == start_from else 'was forked'} from it and "
            f"has no checkpoint of its own, but {problem}; restore the directory or start from "
            "another checkpoint",
            damaged=[problem],
        )
    return Choice(origin, manifest_of_origin, tuple(skipped))


def _candidates(
    run: RunPaths,
    uid: str | None,
    excluded: Collection[str],
    passed: Mapping[str, str],
    skipped: list[str],
) -> Iterator[tuple[Path, Manifest]]:
    """Yield checkpoints that look complete, newest first. Add a line to `skipped` for others."""
    for directory in reversed(run.list_checkpoints()):
        if directory.name in excluded:
            skipped.append(f"{directory.name}: excluded by a rollback")
            continue
        manifest, problem = inspect(directory, verify=False, run_uid=uid)
        problem = passed.get(str(directory), problem)
        if manifest is not None and problem is None:
            yield directory, manifest
        else:
            skipped.append(f"{directory.name}: {problem}")


def inspect(
    directory: Path, *, verify: bool = True, run_uid: str | None = None
) -> tuple[Manifest | None, str | None]:
    """Return (manifest, None) for a valid checkpoint, or (manifest or None, problem).

    With `run_uid`, the manifest must belong to that run.
    """
    try:
        manifest = read_again(lambda: read_manifest(directory))
    except DamagedCheckpointError as error:
        return None, _describe(error.damaged)
    except OSError as error:
        return None, f"its manifest cannot be read: {error.strerror}"
    if manifest is None:
        return None, "never committed"
    if run_uid is not None and manifest.run_uid != run_uid:
        return manifest, f"damaged: its manifest belongs to another run, {manifest.run}"
    if manifest.source is not None:
        return manifest, f"written by the program itself, in its own format, in {manifest.source}"
    damage = find_damage(directory, manifest, contents=verify)
    return manifest, _describe(damage) if damage else None


def _describe(damage: Iterable[str]) -> str:
    lines = list(damage)
    return f"{word_for(lines)}: {'; '.join(lines)}"


# After so many damaged checkpoints in the mirror, the resume stops looking there.
CANDIDATES_MAX: Final = 10

Journal = Callable[..., None]
Fetch = Callable[[Remote, Path, str], int]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search of the mirror for a checkpoint that is newer than the one found here.

    `find` reads a checkpoint and returns a line for each damaged file. `fetch` copies a checkpoint
    of the mirror at a URL into a directory, and returns the bytes that it read. It raises as
    `mirror.fetch.fetch`. With a node-local tier, each node copies it to its own disk.
    """

    run: RunPaths
    run_uid: str
    tiers: Tiers
    nodes: int
    passed: Mapping[str, str]
    journal: Journal
    find: Find
    fetch: Fetch
    start_from: Path | None = None

    def choose(self) -> Choice:
        """Return the newest valid checkpoint of all tiers, after fetching it if necessary.

        Raises as `newest` and `resume.choose` do.
        """
        if not self.tiers.mirror:
            return self._choose_here()
        if not self.tiers.local:
            return self.newest(self._choose_here())
        found = self.newest(self._newest_on_node())
        # The run's folder then has manifests only, but a fork's first parent may be elsewhere.
        return found if found.manifest else self._choose_here()

    def _choose_here(self) -> Choice:
        return choose(
            self.run, passing_over=self.passed, find=self.find, start_from=self.start_from
        )

    def newest(self, here: Choice) -> Choice:
        """Return `here`, or a newer checkpoint of the mirror after fetching it.

        Raises `MirrorError` if the mirror does not answer and there is no checkpoint here. A start
        at step 0 could then lose the progress that the mirror holds.
        """
        try:
            return self._newest(here)
        except MirrorError as error:
            if here.manifest is None:
                raise MirrorError(
                    f"{error}; there is no checkpoint here, and the mirror's contents are unknown. "
                    "Repair the mirror, or remove checkpoint.mirror to begin at step 0"
                ) from error
            line = f"the mirror's contents are unknown: {error}"
            return dataclasses.replace(here, skipped=(*here.skipped, line))

    def _newest(self, here: Choice) -> Choice:
        url = self.tiers.location(self.run.name, self.run_uid)
        retries = Retries()
        store = retries.do(open_store, url)
        without = set(excluded_checkpoints(load_events(self.run)))
        without |= {path.stem for path in self.run.tombstones.glob("*.json")}
        newer_than, lines = _name_of(here, self.run_uid), list(here.skipped)
        for _ in range(CANDIDATES_MAX):
            remote, skipped = newest_remote(
                store, self.run_uid, newer_than=newer_than, without=without, retries=retries
            )
            lines += [line for line in skipped if line not in lines]
            if remote is None:
                return dataclasses.replace(here, skipped=tuple(lines))
            directory = self._destination(remote.name)
            without.add(str(remote.name))
            if str(directory) in self.passed:
                lines.append(f"{remote.name} in the mirror: {self.passed[str(directory)]}")
                continue
            try:
                self._bring(remote, directory, url)
            except DamagedCheckpointError as error:
                lines.append(f"{remote.name} in the mirror: {'; '.join(error.damaged)}")
                continue
            return Choice(directory, remote.manifest, tuple(lines))
        return dataclasses.replace(here, skipped=tuple(lines))

    def _bring(self, remote: Remote, directory: Path, url: str) -> None:
        if (directory / MANIFEST).exists() and not self.tiers.local:
            return
        began = time.monotonic()
        read_bytes = self.fetch(remote, directory, url)
        facts: dict[str, Any] = {"checkpoint": str(remote.name), "step": remote.manifest.step}
        seconds = round(time.monotonic() - began, 6)
        self.journal(
            EventKind.FETCHED,
            **facts,
            url=url,
            bytes=read_bytes,
            seconds=seconds,
            path=str(directory),
        )

    def _newest_on_node(self) -> Choice:
        """Return the newest complete checkpoint on this node's disk, if the run has one node.

        It may be newer than the mirror's."""
        folder = self.tiers.node_folder(self.run.name, self.run_uid)
        excluded = excluded_checkpoints(load_events(self.run))
        for directory in reversed(self.run.list_checkpoints()):
            if self.nodes > 1 or folder is None:
                break
            files = folder.checkpoint(directory.name)
            if directory.name in excluded or str(files) in self.passed or not files.is_dir():
                continue
            with contextlib.suppress(DamagedCheckpointError, OSError):
                manifest = read_again(partial(read_manifest, directory))
                if manifest is not None and not self.find(files, manifest):
                    create_bytes(files / MANIFEST, (directory / MANIFEST).read_bytes())
                    return Choice(files, manifest, ())
        return Choice(None, None, ())

    def _destination(self, name: CheckpointName) -> Path:
        """Return where to fetch a checkpoint to: its own directory if that is free.

        A damaged copy in the run's folder stays for inspection, and the good copy goes beside it.
        A node's own disk is a cache: a damaged copy there is replaced.
        """
        folder = self.tiers.node_folder(self.run.name, self.run_uid)
        if folder is not None:
            return folder.checkpoint(name)
        own = self.run.checkpoint(name)
        is_ours = not own.exists() or (own / FETCHING).exists()
        return own if is_ours else self.run.fetched / str(name)


def _name_of(here: Choice, run_uid: str) -> CheckpointName | None:
    """Return the checkpoint's name, None if it is not in the run's own folder (a fork's origin)."""
    if here.manifest is None or here.manifest.run_uid != run_uid:
        return None
    facts = here.manifest
    return CheckpointName(facts.step, facts.attempt, facts.launch)


# Loads the checkpoint in a directory, with its manifest and train state. Returns what each rank
# restored, and notes for people. All ranks raise `DamagedCheckpointError` if it is damaged.
Load = Callable[[Path, Manifest, Mapping[str, Any]], tuple[list[Restored], Sequence[str]]]

CHOICES_MAX: Final = 100
FALLBACKS_MAX: Final = 100


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The resumed position: training continues after `step`. `checkpoint` is an id, or None.

    `epoch` and `in_epoch` are as in `Progress`.
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
    return load_opened(ranks, state, open_together(directory, manifest, ranks.group), document)


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
