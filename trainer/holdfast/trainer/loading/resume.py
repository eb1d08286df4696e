"""Resume from the newest checkpoint of the run's folder and the mirror.

A checkpoint that only the mirror has is fetched first: to the run's folder, or to each node's disk
if there is a node-local tier. It is then loaded like any other. Rank 0 decides. All ranks verify
and fetch, each a share: see `loading.restore`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.damage import find_damage, word_for
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import FETCHING, MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError
from holdfast.contracts.records import history, known_damage
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.trainer.mirror.transfer import Remote, Retries, newest_remote, open_store

# The choice of the checkpoint from which a run resumes. Rank 0 chooses, without torch.

Find = Callable[[Path, Manifest], list[str]]


@dataclass(frozen=True)
class ResumeChoice:
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
) -> ResumeChoice:
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
    events = history.load_events(run)
    known = known_damage.damaged_checkpoints(events)
    candidates = _candidates(run, uid, history.excluded_checkpoints(events), passed, skipped)
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
            return ResumeChoice(directory, manifest, tuple(skipped[:before]))
        skipped.insert(before, f"{directory.name}: {_describe(damage)}")
        found = following
    if origin is None:
        return ResumeChoice(None, None, tuple(skipped))
    manifest_of_origin, problem = inspect(origin, verify=verify)
    problem = passed.get(str(origin), problem)
    if problem is not None:
        raise DamagedCheckpointError(
            f"{origin}: this run {'starts' if origin == start_from else 'was forked'} from it and "
            f"has no checkpoint of its own, but {problem}; restore the directory or start from "
            "another checkpoint",
            damaged=[problem],
        )
    return ResumeChoice(origin, manifest_of_origin, tuple(skipped))


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
        manifest = reading.read_again(lambda: read_manifest(directory))
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
    `mirror.transfer.fetch`. With a node-local tier, each node copies it to its own disk.
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

    def choose(self) -> ResumeChoice:
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

    def _choose_here(self) -> ResumeChoice:
        return choose(
            self.run, passing_over=self.passed, find=self.find, start_from=self.start_from
        )

    def newest(self, here: ResumeChoice) -> ResumeChoice:
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

    def _newest(self, here: ResumeChoice) -> ResumeChoice:
        url = self.tiers.location(self.run.name, self.run_uid)
        retries = Retries()
        store = retries.do(open_store, url)
        without = set(history.excluded_checkpoints(history.load_events(self.run)))
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
            return ResumeChoice(directory, remote.manifest, tuple(lines))
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

    def _newest_on_node(self) -> ResumeChoice:
        """Return the newest complete checkpoint on this node's disk, if the run has one node.

        It may be newer than the mirror's."""
        folder = self.tiers.node_folder(self.run.name, self.run_uid)
        excluded = history.excluded_checkpoints(history.load_events(self.run))
        for directory in reversed(self.run.list_checkpoints()):
            if self.nodes > 1 or folder is None:
                break
            files = folder.checkpoint(directory.name)
            if directory.name in excluded or str(files) in self.passed or not files.is_dir():
                continue
            with contextlib.suppress(DamagedCheckpointError, OSError):
                manifest = reading.read_again(partial(read_manifest, directory))
                if manifest is not None and not self.find(files, manifest):
                    durable.create_bytes(files / MANIFEST, (directory / MANIFEST).read_bytes())
                    return ResumeChoice(files, manifest, ())
        return ResumeChoice(None, None, ())

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


def _name_of(here: ResumeChoice, run_uid: str) -> CheckpointName | None:
    """Return the checkpoint's name, None if it is not in the run's own folder (a fork's origin)."""
    if here.manifest is None or here.manifest.run_uid != run_uid:
        return None
    facts = here.manifest
    return CheckpointName(facts.step, facts.attempt, facts.launch)
