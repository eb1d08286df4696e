"""Every name that Holdfast puts on disk, and the parsing of those that carry numbers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.reading import held_folder, is_mine

ROOT_ID = ".holdfast-root"
MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
LATEST = "latest"
PARTS = "parts"
READING = ".reading-"
REMOVING = ".removing"
MIRRORED = "mirrored.json"
FETCHING = "fetching.json"

# One spelling for each: `step-000000007` would be read as a directory that is not there.
# No number has more digits than every column and clock can hold.
_CHECKPOINT = re.compile(
    r"step-([0-9]{8}|[1-9][0-9]{8,14})\.a([0-9]{4}|[1-9][0-9]{4,8})"
    r"\.l([0-9]{2}|[1-9][0-9]{2,8})"
)
_ATTEMPT = re.compile(r"[0-9]{4}|[1-9][0-9]{4,8}")
_REMOVING = re.compile(rf".*{re.escape(REMOVING)}")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def holdfast_home() -> Path:
    """`$HOLDFAST_HOME`, or `~/.holdfast`: this person's database and settings."""
    return Path(os.environ.get("HOLDFAST_HOME") or "~/.holdfast").expanduser()


def default_root() -> Path:
    """`$HOLDFAST_ROOT`, or `runs` under the home: where runs live unless a root is named."""
    given = os.environ.get("HOLDFAST_ROOT")
    return Path(given).expanduser().absolute() if given else holdfast_home() / "runs"


@dataclass(frozen=True, order=True)
class CheckpointName:
    """What a checkpoint directory's name says: its step and who wrote it."""

    step: int
    attempt: int
    launch: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt:04d}.l{self.launch:02d}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """The parts of `name`, or None when it is not a checkpoint directory's name."""
        match = _CHECKPOINT.fullmatch(name)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None


def lease_path(checkpoint: Path, holder: str) -> Path:
    """The file that says `holder` reads the directory `checkpoint`; it lies beside it."""
    return checkpoint.with_name(f"{checkpoint.name}{READING}{holder}")


def list_leases(checkpoint: Path) -> list[Path]:
    """Every lease on the directory `checkpoint`, expired or not."""
    prefix = f"{checkpoint.name}{READING}"
    try:
        with os.scandir(checkpoint.parent) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def checkpoint_id(run: str, directory_name: str) -> str:
    """The name of a checkpoint for people and the API: `<run>:<directory name>`."""
    return f"{run}:{directory_name}"


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt, under `<root>/<run>/attempts/<NNNN>`."""

    directory: Path

    @property
    def number(self) -> int:
        return int(self.directory.name)

    @property
    def request(self) -> Path:
        return self.directory / "request.json"

    @property
    def submission(self) -> Path:
        return self.directory / "submission.json"

    @property
    def submitting(self) -> Path:
        """How often, when and from where the scheduler was asked to take the job."""
        return self.directory / "submitting.json"

    @property
    def missing(self) -> Path:
        """Since when something that should be there has been looked for in vain."""
        return self.directory / "missing.json"

    @property
    def claim(self) -> Path:
        return self.directory / "claim.json"

    @property
    def channel(self) -> Path:
        return self.directory / "channel.json"

    @property
    def stop(self) -> Path:
        return self.directory / "stop.json"

    @property
    def outcome(self) -> Path:
        return self.directory / "outcome.json"

    @property
    def ending_lock(self) -> Path:
        """Held while somebody writes the attempt's one `attempt_ended` line."""
        return self.directory / ".ending.lock"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    @property
    def heartbeats(self) -> Path:
        return self.directory / "heartbeats"

    @property
    def dumps(self) -> Path:
        return self.directory / "dumps"

    def dump(self, node: int, number: int) -> Path:
        """A node's proof of the attempt's `number`-th suspicion of a hang: stacks of its ranks."""
        return self.dumps / f"node-{node:04d}-{number:02d}"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def node_logs(self, node: int) -> Path:
        return self.logs / f"node-{node:04d}"

    def rank_log(self, node: int, launch: int, rank: int, stream: str = "stdout") -> Path:
        """The output of one rank; `stream` is `stdout` or `stderr`."""
        return self.node_logs(node) / f"l{launch:02d}" / f"rank-{rank:05d}.{stream}.log"

    def flusher_log(self, node: int) -> Path:
        """What a node's flusher says, where no agent gathers it."""
        return self.node_logs(node) / "flusher.log"

    def node_journal(self, node: int) -> Path:
        return self.journal / f"node-{node:04d}.jsonl"

    @property
    def rank_journal(self) -> Path:
        """Rank 0's lines: resumed, staged, committed."""
        return self.journal / "rank0.jsonl"

    def heartbeat(self, node: int) -> Path:
        return self.heartbeats / f"node-{node:04d}.json"

    def mirror_journal(self, node: int) -> Path:
        """What became of the copies that a node's flusher sent to the mirror."""
        return self.journal / f"mirror-{node:04d}.jsonl"

    def launch(self, number: int) -> Path:
        """A folder whose exclusive creation takes a launch number."""
        return self.directory / "launches" / f"{number:02d}"

    def flusher_address(self, launch: int, node: int) -> Path:
        """The file by which a flusher without an agent is found; the next launch looks for it."""
        return self.launch(launch) / f"flusher-{node:04d}.address"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, under `<root>/<run>`."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def spec(self) -> Path:
        return self.directory / "spec.json"

    @property
    def reserve(self) -> Path:
        """Bytes of no meaning; they are deleted when a request finds the disk full."""
        return self.directory / "reserve"

    @property
    def flow_lock(self) -> Path:
        return self.directory / "flow.lock"

    @property
    def operator_lock(self) -> Path:
        """Held while an operator looks whether another one's request is under way, and asks."""
        return self.directory / "operator.lock"

    @property
    def private(self) -> Path:
        """A folder for the run's user alone."""
        return self.directory / "private"

    @property
    def secrets(self) -> Path:
        """The values of the spec's references that were resolved at submission; 0600."""
        return self.private / "secrets.json"

    @property
    def flow_log(self) -> Path:
        """The output of a flow that was started here and not by a Prefect worker."""
        return self.directory / "flow.log"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def journal_of(self, writer: str) -> Path:
        return self.journal / f"{writer}.jsonl"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics"

    def metrics_of(self, attempt: int, launch: int) -> Path:
        """What the program logged in one launch, as JSON lines."""
        return self.metrics / f"a{attempt:04d}.l{launch:02d}.jsonl"

    @property
    def stop_file(self) -> Path:
        """Its existence stops a program that runs without an agent."""
        return self.directory / "stop"

    @property
    def code(self) -> Path:
        return self.directory / "code"

    @property
    def attempts(self) -> Path:
        return self.directory / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def fetched(self) -> Path:
        """Copies from the mirror of checkpoints whose own directory here is damaged."""
        return self.directory / "fetched"

    @property
    def exports(self) -> Path:
        """Checkpoints in other forms, where nobody named another place for them."""
        return self.directory / "exports"

    @property
    def tombstones(self) -> Path:
        return self.directory / "tombstones"

    @property
    def latest(self) -> Path:
        return self.checkpoints / LATEST

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / f"{number:04d}")

    def checkpoint(self, name: CheckpointName | str) -> Path:
        return self.checkpoints / str(name)

    def tombstone(self, name: CheckpointName | str) -> Path:
        return self.tombstones / f"{name}.json"

    def list_attempts(self) -> list[AttemptPaths]:
        """The attempts that were reserved, in order of number."""
        return [self.attempt(n) for n in sorted(map(int, _names(self.attempts, _ATTEMPT)))]

    def list_checkpoint_names(self) -> list[CheckpointName]:
        """The names of all checkpoint directories, committed or not, oldest step first."""
        found = (CheckpointName.parse(name) for name in _names(self.checkpoints, _CHECKPOINT))
        known = (name for name in found if name is not None)
        return sorted(known, key=lambda name: (name.step, name.attempt, name.launch))

    def list_checkpoints(self) -> list[Path]:
        """All checkpoint directories, committed or not, oldest step first."""
        return [self.checkpoint(name) for name in self.list_checkpoint_names()]

    def removing(self, name: CheckpointName | str) -> Path:
        """Where a deleted checkpoint's directory lies while its files are removed."""
        return self.checkpoints / f"{name}{REMOVING}"

    def list_removing(self) -> list[Path]:
        """What deletions that were cut short have left."""
        return [self.checkpoints / name for name in sorted(_names(self.checkpoints, _REMOVING))]

    def list_journals(self) -> list[Path]:
        """Every journal of the run: its own writers' and each attempt's nodes'."""
        own = sorted(self.journal.glob("*.jsonl"))
        return own + [p for a in self.list_attempts() for p in sorted(a.journal.glob("*.jsonl"))]


@dataclass(frozen=True)
class HeldRun(RunPaths):
    """A run whose folders of checkpoints and tombstones are held open, see `hold`."""

    held_checkpoints: Path
    held_tombstones: Path

    @property
    def checkpoints(self) -> Path:
        return self.held_checkpoints

    @property
    def tombstones(self) -> Path:
        return self.held_tombstones


@contextlib.contextmanager
def hold(paths: RunPaths) -> Iterator[HeldRun]:
    """The run with the folders that a deletion changes, whatever is put in their place meanwhile.

    A link in the place of one is a `ForeignFileError`, unless it is one's own.
    """
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(_hold(each, paths))
            for each in (paths.checkpoints, paths.tombstones)
        ]
        yield HeldRun(paths.directory, *held)


def _hold(folder: Path, paths: RunPaths) -> contextlib.AbstractContextManager[Path]:
    is_own = folder.is_symlink() and is_mine(folder)
    target = folder.resolve() if is_own else folder
    return held_folder(target, below=target.parent if is_own else paths.directory)


def folder_of(path: Path) -> Path:
    """The run's folder that a journal or document lies in by its name; else its own folder."""
    for up in (1, 2):
        if len(path.parents) > up + 1 and path.parents[up].name == "attempts":
            return path.parents[up + 1]
    is_inside = path.parent.name in {"journal", "tombstones", "metrics"}
    return path.parents[1] if is_inside else path.parent


def precedence(paths: RunPaths) -> tuple[bool, int]:
    """Sorts folders that have the same uid: the lesser one is the run that the uid means.

    Anybody can write another run's uid into a spec, and a copy of a folder has it too. One's own
    folder comes first, then the one whose spec has been there longer: its time of change is set by
    the file system. Raises `OSError` when there is no spec.
    """
    return not is_mine(paths.directory), paths.spec.lstat().st_ctime_ns


def list_runs(root: Path) -> list[RunPaths]:
    """The runs under `root`: the folders that hold a `spec.json` that one may see, by name."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        found = sorted(entry.path for entry in entries if has_spec(Path(entry.path)))
    return [RunPaths(Path(path)) for path in found]


def has_spec(directory: Path) -> bool:
    """True when something called `spec.json` can be seen in `directory`, whatever it is."""
    try:
        (directory / "spec.json").lstat()
    except OSError:
        return False
    return True


def _names(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    """The folders in `directory` that are called so; links are none of them.

    `directory` itself may be a link of one's own, to another disk say, and of nobody else.
    """
    if not directory.is_dir() or (directory.is_symlink() and not is_mine(directory)):
        return []
    with os.scandir(directory) as entries:
        return [
            entry.name
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
