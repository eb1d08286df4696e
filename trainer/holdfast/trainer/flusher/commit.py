"""Commit a written step: the nodes' part files, the manifest, then `latest`.

Each node writes a part file that lists what it wrote. Node 0 writes the manifest when all parts
are there. If node 0 is lost, the lowest remaining node does. Several nodes may try it: the
manifest is created exclusively, so one node succeeds and the others report the same commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.disk.bounds import SECONDS_MAX
from holdfast.contracts.disk.manifest import FileEntry, Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, PARTS, CheckpointName, RunPaths
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher.hints import Hints, log
from holdfast.trainer.flusher.shards import launch_folder, name_shards
from holdfast.trainer.placed import find_commit, fsync_commit, is_saving_folder, publish
from holdfast.trainer.slots.slot_table import SlotTable

OVERTAKEN_CHECK_S: Final = 0.5
LOOK_RETRY_S: Final = 10.0
# When the other nodes try to commit if no agent reports a lost node. Lower nodes try earlier.
TAKEOVER_S: Final = 30.0
TAKEOVER_STAGGER_S: Final = 1.0
FAILED_PART: Final = "failed.json"
NODES_NAMED_MAX: Final = 16
_PART = re.compile(r"node-(\d{4,})\.json")


@dataclass(frozen=True)
class PeerState:
    """What this node knows of the other nodes while a step waits for them.

    `abandoned` returns the reason why the step was given up, or None. `lost` returns the lost
    nodes. `report` tells the agent, if any, that this node has written its part, or that it failed.
    `writers` has for each lost node the one that writes its part from copies, if any. `number`
    counts the tries to commit a step: each has its own parts.
    """

    abandoned: Callable[[], str | None]
    lost: Callable[[], Collection[int]] = frozenset
    report: Callable[[], object] = lambda: None
    hints: Hints = field(default_factory=Hints)
    writers: Mapping[int, int] = field(default_factory=dict)
    number: int = 1

    def parts_in(self, directory: Path) -> Path:
        """Return the folder of the parts of a step."""
        return directory / PARTS if self.number == 1 else directory / PARTS / str(self.number)


def commit_alone(run: RunPaths, directory: Path, part: dict[str, Any]) -> Manifest:
    """Commit a step that one node wrote. Raises `SaveError` or `OSError` if the commit fails."""
    return _write_manifest(run, directory, [part])


def commit_together(
    run: RunPaths, directory: Path, part: dict[str, Any], peers: PeerState
) -> Manifest:
    """Write this node's part and wait until this node or another commits the step.

    Raises `SaveError` with what is missing if the step cannot be committed, and `OSError` if
    storage fails.
    """
    # The part goes to disk before the hint: a hint to look for a missing file would be lost.
    leave_part(peers.parts_in(directory), part)
    peers.report()
    return _Wait(run, directory, part, peers).for_commit()


def leave_part(parts: Path, part: dict[str, Any]) -> None:
    """Leave what a node wrote for the node that commits. Raises `OSError` if storage fails."""
    durable.make_directory(parts)
    durable.write_bytes(parts / part_name(part["node"]), durable.to_json(part))


def accept_commit(run: RunPaths, directory: Path, *, is_alone: bool) -> None:
    """Make durable a commit that an earlier flusher wrote, then update `latest` and clean up.

    Raises `OSError` if storage fails. With `is_alone`, the manifest is then removed, because it
    might not survive a power cut. On several nodes another node may have made it durable already.
    """
    try:
        fsync_commit(directory)
    except OSError:
        if is_alone:
            with contextlib.suppress(OSError):
                (directory / MANIFEST).unlink()
        raise
    _tidy(run, directory)


def leave_failure(parts: Path, node: int, reason: str, *, for_all: bool) -> None:
    """Report to the other nodes that this node will not deliver the step, if storage allows.

    `for_all` means that no other node will commit the step either. If this write fails too, for
    example because storage is full, the other nodes find out by their timeout.
    """
    names = [part_name(node)] + ([FAILED_PART] if for_all else [])
    with contextlib.suppress(OSError):
        durable.make_directory(parts)
        # This node's own part stops the node that gathers. `failed.json` stops the nodes that only
        # wait.
        for name in names:
            durable.write_bytes(parts / name, durable.to_json({"node": node, "error": reason}))


def report_incomplete(table: SlotTable, reason: str) -> None:
    """Report to the other nodes, if any, that the step of `table` stays incomplete on this node."""
    if table.nodes > 1:
        leave_failure(table.directory / PARTS, table.node, reason, for_all=table.node == 0)


def committer_of(nodes: int, lost: Collection[int]) -> int | None:
    """Return the node that writes the manifest: the lowest one not lost, None if all are lost."""
    return min(set(range(nodes)) - set(lost), default=None)


def part_name(node: int) -> str:
    return f"node-{node:04d}.json"


def _write_manifest(run: RunPaths, directory: Path, parts: Sequence[dict[str, Any]]) -> Manifest:
    """Write the manifest durably, which commits. Raises `SaveError` if a rank is missing."""
    # Every rank must be there: each has keys that no other rank has, see decision 18.
    ranks = sorted(rank for part in parts for rank in part["ranks"])
    world_size = parts[0]["world_size"]
    facts = next((part["manifest"] for part in parts if part["manifest"]), None)
    if ranks != list(range(world_size)) or facts is None:
        raise SaveError(
            f"{directory.name}: ranks {ranks} were staged, but ranks 0 to {world_size - 1} were "
            "expected. Save the same step on every rank"
        )
    counts = Counter(file["path"] for part in parts for file in part["files"])
    if twice := [path for path, count in counts.items() if count > 1]:
        raise SaveError(
            f"{directory.name}: several ranks wrote {twice[0]}, but each file must have one "
            "writer. Give each rank its own file"
        )
    staged_at = max(part["staged_at"] for part in parts)
    manifest = Manifest(
        **facts,
        files=tuple(FileEntry(**f) for part in parts for f in part["files"]),
        blocked_s=max(part["blocked_s"] for part in parts),
        flush_s=min(max(0.0, max(part["fsynced_at"] for part in parts) - staged_at), SECONDS_MAX),
        staged_at=staged_at,
        committed_at=time.time(),
    )
    # Exclusive, so two nodes that take over at the same time cannot both commit, see decision 14.
    if not durable.create_bytes(directory / MANIFEST, encode_manifest(manifest)):
        return _accept_theirs(directory, manifest)
    _tidy(run, directory)
    return manifest


def _accept_theirs(directory: Path, ours: Manifest) -> Manifest:
    """Return the manifest that another node wrote of the same files at the same time."""
    theirs = find_commit(directory)
    if theirs is None or set(theirs.files) != set(ours.files):
        raise SaveError(
            f"{directory}: another process committed other files there at the same time. Nothing "
            "was replaced. Two programs must not write the same attempt and launch of a run"
        )
    # The other node may die before its own fsync, and this node reports the commit.
    fsync_commit(directory)
    return theirs


def _tidy(run: RunPaths, directory: Path) -> None:
    """Remove the parts, and move `latest`, or move a save up into the program's own directory.

    Errors here cannot undo the commit. Raises `SaveError` if a save could not be moved up.
    """
    # After the commit: without the parts, a node that is late finds the manifest instead.
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    if not is_saving_folder(directory):
        _move_latest(run, directory.name)
        return
    try:
        publish(directory)
    except OSError as error:
        raise SaveError(
            f"{directory.parent}: the checkpoint is complete in {directory.name}, but its files "
            f"could not be moved up: {error}. The next dcp.save or dcp.load there completes it"
        ) from error


def _move_latest(run: RunPaths, name: str) -> None:
    """Point `latest` at the newest commit, as a convenience. Resume never reads it."""
    temporary = run.checkpoints / ".latest.tmp"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        # A rename, so that a reader never finds the name missing.
        os.replace(temporary, run.latest)
    except OSError as error:
        log(f"{name} is committed; no new `latest`: {error}")


class _Wait:
    """A bounded wait for other nodes, which polls the shared directory."""

    def __init__(
        self, run: RunPaths, directory: Path, part: dict[str, Any], peers: PeerState
    ) -> None:
        self._run, self._directory, self._own, self._peers = run, directory, part, peers
        self._folder = peers.parts_in(directory)
        self._began = self._checked = time.monotonic()
        self._peers_wait_s = flush_timeout_s()
        self._parts: dict[int, dict[str, Any]] = {part["node"]: part}
        self._lost_since: dict[int, float] = {}
        self._refused_since: float | None = None
        # A shared directory may show another node's files late, at most after this time.
        self._lost_grace_s = filesystems.delay_s(directory)

    def for_commit(self) -> Manifest:
        """Return the manifest, from any node. Raises `SaveError` if there will be none."""
        node, nodes = self._own["node"], self._own["nodes"]
        while True:
            committer = committer_of(nodes, self._lost_nodes())
            # Without reports of lost nodes, time decides. An exclusive manifest makes it harmless
            # if the lost node still lives.
            gathers = node == committer or self._is_due_to_take_over()
            manifest = self._check_directory(gathers)
            if manifest is not None:
                # The node that wrote it may die before it calls fsync.
                fsync_commit(self._directory)
                return manifest
            if len(self._parts) == nodes:
                parts = [self._parts[each] for each in range(nodes)]
                return _write_manifest(self._run, self._directory, parts)
            if gathers:
                self._raise_if_lost()
            missing = sorted(set(range(nodes)) - set(self._parts))
            self._pause(missing if committer in {node, None} else [committer])

    def _check_directory(self, gathers: bool) -> Manifest | None:
        """Return the manifest, None if there is none. Storage may fail for `LOOK_RETRY_S`."""
        try:
            # A save that has moved up is found in the directory above.
            may_be_there = filesystems.is_there(self._directory / MANIFEST) or is_saving_folder(
                self._directory
            )
            manifest = find_commit(self._directory) if may_be_there else None
            if manifest is None:
                self._look_at_parts(gathers)
        except OSError:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            # Storage that fails for a moment must not lose a step that every node has written.
            if now - self._refused_since > LOOK_RETRY_S:
                raise
            return None
        self._refused_since = None
        return manifest

    def _is_due_to_take_over(self) -> bool:
        waited_s = time.monotonic() - self._began
        return bool(waited_s > TAKEOVER_S + TAKEOVER_STAGGER_S * self._own["node"])

    def _look_at_parts(self, gathers: bool) -> None:
        """Raise `SaveError` if a node reports that the step failed. With `gathers`, read parts."""
        if filesystems.is_there(self._folder / FAILED_PART):
            self._raise_failure()
        if gathers:
            self._gather(_list(self._folder))

    def _gather(self, names: Collection[str]) -> None:
        """Read the new parts. Raises `SaveError` if one reports that its node failed."""
        for name in names:
            match = _PART.fullmatch(name)
            if match is None or int(match[1]) in self._parts:
                continue
            with contextlib.suppress(FileNotFoundError):
                part = json.loads((self._folder / name).read_bytes())
                if "error" in part:
                    raise SaveError(f"node {part['node']}: {part['error']}")
                self._parts[int(match[1])] = part

    def _raise_failure(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            failed = json.loads((self._folder / FAILED_PART).read_bytes())
            raise SaveError(f"node {failed['node']}: {failed['error']}")

    def _lost_nodes(self) -> list[int]:
        """Return the lost nodes, and record when each was first reported lost."""
        lost = sorted(self._peers.lost())
        for node in lost:
            self._lost_since.setdefault(node, time.monotonic())
        return lost

    def _raise_if_lost(self) -> None:
        """Raise `SaveError` if lost nodes left no part and none can still appear."""
        late = time.monotonic() - self._lost_grace_s
        lost, writers = self._lost_since, self._peers.writers
        gone = [n for n, t in lost.items() if n not in self._parts and t < late]
        # Another node may still be writing the files of a lost one.
        gone = [node for node in gone if node not in writers or writers[node] in lost]
        if gone:
            # A client may still remember that the part does not exist, see decision 48.
            filesystems.revalidate(self._folder)
            self._gather(_list(self._folder))
            gone = [node for node in gone if node not in self._parts]
        if gone:
            raise SaveError(
                f"{self._directory.name}: {_name_nodes(gone)} were lost before they wrote all "
                f"their files. Missing: {self._name_missing_ranks()}. Nothing was committed"
                f"{self._name_lost_shards(gone)}"
            )

    def _name_lost_shards(self, nodes: Sequence[int]) -> str:
        folder = launch_folder(self._run, self._directory.name)
        found = name_shards(folder, nodes)
        return f". Lost: {found}" if found else ""

    def _name_missing_ranks(self) -> str:
        there = {rank for part in self._parts.values() for rank in part["ranks"]}
        return f"ranks {_ranges(set(range(self._own['world_size'])) - there)}"

    def _pause(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        waited = now - self._began
        if waited > self._peers_wait_s:
            # The last look, so that the error names exactly what is missing.
            self._gather(_list(self._folder))
            raise SaveError(
                f"{self._directory.name}: {_name_nodes(missing)} wrote no parts within "
                f"{self._peers_wait_s:.0f} s. Missing: {self._name_missing_ranks()}. Check that "
                "all nodes mount the same directory and that those nodes are alive"
            )
        if reason := self._peers.abandoned():
            raise SaveError(f"{self._directory.name}: {reason}")
        if now - self._checked > OVERTAKEN_CHECK_S and self._peers.number == 1:
            # A later try is of a step that may be older than one which was tried before.
            self._checked = now
            self._raise_if_overtaken(missing)
        self._peers.hints.wait(waited)

    def _raise_if_overtaken(self, missing: Sequence[int]) -> None:
        # The client's cache may hide the later step's part, see decision 48.
        filesystems.refresh(self._directory)
        overtaken = [node for node in missing if self._is_overtaken(node)]
        if overtaken:
            raise SaveError(
                f"{self._directory.name}: {_name_nodes(overtaken)} continued with a later "
                "step and did not write this one"
            )

    def _is_overtaken(self, node: int) -> bool:
        """Return True if `node` wrote a part of a later step. Each node writes steps in order."""
        own = CheckpointName.parse(self._directory.name)
        for other in self._run.list_checkpoints():
            name = CheckpointName.parse(other.name)
            if own is None or name is None or name <= own:
                continue
            same_writer = (name.attempt, name.launch) == (own.attempt, own.launch)
            if same_writer and filesystems.is_there(other / PARTS / part_name(node)):
                return True
        return False


def _list(directory: Path) -> list[str]:
    """Return the names in `directory`, none if the committing node has removed it."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _name_nodes(nodes: Sequence[int]) -> str:
    shown = ", ".join(map(str, nodes[:NODES_NAMED_MAX]))
    more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
    return f"nodes [{shown}]{more}"


def _ranges(numbers: Collection[int]) -> str:
    """Format numbers as ranges: `0 to 3, 8` for {0, 1, 2, 3, 8}."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in found)
