"""The names of all files and folders that Holdfast creates, and the parsing of numbered names."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.reading import HELD, held_folder, is_mine
from holdfast.contracts.errors import ForeignFileError, SpecError

ROOT_ID = ".holdfast-root"
MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
METADATA = ".metadata"
LATEST = "latest"
PARTS = "parts"
READING = ".reading-"
REMOVING = ".removing"
MIRRORED = "mirrored.json"
FETCHING = "fetching.json"
# In a run's part of `checkpoint.directory`: a link to the run's folder.
OF_RUN = "run"

# Each number has exactly one spelling, so `step-000000007` is not accepted for `step-00000007`.
# The digits are limited to what database columns can store.
_CHECKPOINT = re.compile(
    r"step-([0-9]{8}|[1-9][0-9]{8,14})\.a([0-9]{4}|[1-9][0-9]{4,8})"
    r"\.l([0-9]{2}|[1-9][0-9]{2,8})"
)
# `Path` makes one slash of several.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_ATTEMPT = re.compile(r"[0-9]{4}|[1-9][0-9]{4,8}")
_REMOVING = re.compile(rf".*{re.escape(REMOVING)}")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# A name in a spec. The name of a run's folder can end in .r2, .r3, …
SPEC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def holdfast_home() -> Path:
    """Return `$HOLDFAST_HOME` or `~/.holdfast`, the folder of a user's database and settings."""
    return _given_folder("HOLDFAST_HOME") or Path("~/.holdfast").expanduser()


def refuse_others_home() -> None:
    """Raise `ForeignFileError` if the Holdfast home belongs to another account.

    Files that this process would create or replace there could not be read by that account: a
    command of root would lock a server's account out of its own tokens and index.
    """
    home, me = holdfast_home(), os.geteuid()
    # A folder that does not exist yet becomes ours.
    owner = home.stat().st_uid if home.exists() else me
    if owner == me:
        return
    name = account_name(owner)
    problem = (
        f"belongs to the account {name}, which could not read what {account_name(me)} writes "
        f"there; call the command as that account, for example with `sudo -u {name}`, or set "
        "HOLDFAST_HOME to a folder of your own"
    )
    raise ForeignFileError(home, problem)


def account_name(uid: int) -> str:
    """Return the name of an account, or its number if it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def default_root() -> Path:
    """Return the default root of runs: `$HOLDFAST_ROOT`, or `runs` in the Holdfast home."""
    return _given_folder("HOLDFAST_ROOT") or holdfast_home() / "runs"


def _given_folder(variable: str) -> Path | None:
    """Return the folder in an environment variable, or None if it is not set.

    A relative one is made absolute there too, for the processes that this one starts elsewhere.
    """
    given = os.environ.get(variable)
    if not given:
        return None
    folder = given_folder(given, variable)
    if str(folder) != given:
        os.environ[variable] = str(folder)
    return folder


def given_folder(given: str | Path, name: str) -> Path:
    """Return a folder that a person gave as an absolute path; `name` is the option or variable.

    It may be missing. Raises `SpecError` for a file, and for what is not a path, such as a URL.
    """
    text = str(given)
    if not text.strip() or _URL.match(text):
        raise SpecError(f"{name}={text!r}: expected the path of a folder")
    folder = absolute_path(text, name)
    # Unlike those of `Path`, these raise nothing for a folder that this user may not search.
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SpecError(f"{name}={text!r}: this is not a folder; expected one, or a new path")
    return folder


def absolute_path(given: str, name: str) -> Path:
    """Return a path as an absolute one, with `~` expanded. Raises `SpecError` naming `name`."""
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:
        account = given.partition("/")[0]
        raise SpecError(
            f"{name}={given!r}: there is no account with the home {account}; write the whole path"
        ) from error


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The parts of a checkpoint directory's name: its step, attempt and launch."""

    step: int
    attempt: int
    launch: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt:04d}.l{self.launch:02d}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """Return the parts of `name`, or None if it is not the name of a checkpoint directory."""
        match = _CHECKPOINT.fullmatch(name)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None


# The checkpoint of an imported run. No attempt wrote it.
IMPORTED: Final = CheckpointName(step=0, attempt=0, launch=0)


def lease_path(checkpoint: Path, holder: str) -> Path:
    """Return the path of `holder`'s lease on the directory `checkpoint`, beside that directory."""
    return checkpoint.with_name(f"{checkpoint.name}{READING}{holder}")


def list_leases(checkpoint: Path) -> list[Path]:
    """Return every lease on the directory `checkpoint`, expired or not."""
    prefix = f"{checkpoint.name}{READING}"
    try:
        with os.scandir(checkpoint.parent) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def checkpoint_id(run: str, directory_name: str) -> str:
    """Return a checkpoint's id, `<run>:<directory name>`."""
    return f"{run}:{directory_name}"


class _Entry:
    """A file or folder with a fixed name in the `directory` of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: AttemptPaths | RunPaths, _kind: type) -> Path:
        return owner.directory / self._name


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt, in `<root>/<run>/attempts/<NNNN>`."""

    directory: Path

    request = _Entry("request.json")
    submission = _Entry("submission.json")
    # The count, time and host of the job's submissions.
    submitting = _Entry("submitting.json")
    # The time since which an expected job or outcome could not be found.
    missing = _Entry("missing.json")
    claim = _Entry("claim.json")
    channel = _Entry("channel.json")
    # Which nodes have led the attempt after node 0, and the channels of each.
    terms = _Entry("terms")
    stop = _Entry("stop.json")
    # Which nodes of the job the scheduler's operators drain, and their reasons.
    drained = _Entry("drained.json")
    outcome = _Entry("outcome.json")
    # The lock for writing the attempt's single `attempt_ended` line.
    ending_lock = _Entry(".ending.lock")
    journal = _Entry("journal")
    # Rank 0's journal, such as the lines `resumed`, `staged` and `committed`.
    rank_journal = _Entry("journal/rank0.jsonl")
    heartbeats = _Entry("heartbeats")
    # What each node's ranks and GPUs did over time.
    series = _Entry("series")
    dumps = _Entry("dumps")
    # The job as Slurm restarted it after the attempt, and what became of the restart.
    restart = _Entry("restart.json")
    verdict = _Entry("verdict.json")
    # Where nodes that test each other find each other, while they do.
    health = _Entry("health")
    logs = _Entry("logs")

    @property
    def number(self) -> int:
        return int(self.directory.name)

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.directory.parent.parent)

    def dump(self, node: int, number: int) -> Path:
        """Return the folder of a node's rank stacks for the `number`-th suspected hang."""
        return self.dumps / f"node-{node:04d}-{number:02d}"

    def node_logs(self, node: int) -> Path:
        return self.logs / f"node-{node:04d}"

    def rank_log(self, node: int, launch: int, rank: int, stream: str = "stdout") -> Path:
        """Return the log of one rank's output. `stream` is `stdout` or `stderr`."""
        return self.node_logs(node) / f"l{launch:02d}" / f"rank-{rank:05d}.{stream}.log"

    def flusher_log(self, node: int) -> Path:
        """Return the log of a node's flusher where no agent collects its output."""
        return self.node_logs(node) / "flusher.log"

    def node_journal(self, node: int) -> Path:
        return self.journal / f"node-{node:04d}.jsonl"

    def mirror_journal(self, node: int) -> Path:
        """Return the journal of the copies that a node's flusher sent to the mirror."""
        return self.journal / f"mirror-{node:04d}.jsonl"

    def term(self, number: int) -> Path:
        """Return the file of a term. Its exclusive creation makes a node the attempt's lead."""
        return self.terms / f"{number:04d}.json"

    def term_end(self, number: int) -> Path:
        """Return the file that says that no node continues after the lead of a term is lost."""
        return self.terms / f"{number:04d}-ends.json"

    def term_begin(self, number: int) -> Path:
        """Return the file that decides whether launches begin in a term after the first one."""
        return self.terms / f"{number:04d}-begins.json"

    def channel_of(self, number: int) -> Path:
        """Return the file by which nodes find the lead of a term."""
        return self.channel if number == 1 else self.directory / f"channel-{number:04d}.json"

    def launch(self, number: int) -> Path:
        """Return the folder of a launch. Its exclusive creation reserves the launch number."""
        return self.directory / "launches" / f"{number:02d}"

    def flusher_address(self, launch: int, node: int) -> Path:
        """Return the file by which the next launch finds a flusher that has no agent."""
        return self.launch(launch) / f"flusher-{node:04d}.address"


@dataclass(frozen=True)
class SuccessorPaths(AttemptPaths):
    """The files of one successor, in `<root>/<run>/successors/<NNNN>`.

    A successor is a job that waits in the queue to become the next attempt. Of the files of an
    attempt it has the request, the submission and the logs.
    """


@dataclass(frozen=True)
class ConsumerPaths(AttemptPaths):
    """The files of one start of a consumer, in `<root>/<run>/consumers/<NNNN>`.

    Of the files of an attempt it has the claim and the outcome, and in a separate job the
    request, the submission and the logs.
    """

    order = _Entry("order.json")
    # What the command reports, and what it printed.
    metrics_file = _Entry("metrics.json")
    log = _Entry("output.log")


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, in `<root>/<run>`."""

    directory: Path

    spec = _Entry("spec.json")
    # A file that reserves disk space. A request that finds the disk full deletes it.
    reserve = _Entry("reserve")
    flow_lock = _Entry("flow.lock")
    # Held by the Prefect worker that starts the run's flow again.
    worker_lock = _Entry("worker.lock")
    # The lock for giving an order, and for acting on the orders that were read, see `orders`.
    orders_lock = _Entry("orders.lock")
    # A folder that only the run's user can read.
    private = _Entry("private")
    # The values of secret references that were resolved at submission. Mode 0600.
    secrets = _Entry("private/secrets.json")
    # The output of a supervisor that was not started by a Prefect worker.
    flow_log = _Entry("flow.log")
    journal = _Entry("journal")
    metrics = _Entry("metrics")
    # If this file exists, a program that runs without an agent stops.
    stop_file = _Entry("stop")
    code = _Entry("code")
    attempts = _Entry("attempts")
    # The jobs that were submitted ahead of the attempts which they may run.
    successors = _Entry("successors")
    # The starts of the programs that use committed checkpoints.
    consumers = _Entry("consumers")
    # Copies from the mirror of checkpoints whose directories in the run are damaged.
    fetched = _Entry("fetched")
    # Checkpoints that a framework converts to load them, while it loads them.
    converted = _Entry("converted")
    # How far the journals are delivered to other services.
    deliveries = _Entry("deliveries")
    # The default folder of exported checkpoints.
    exports = _Entry("exports")

    @property
    def name(self) -> str:
        return self.directory.name

    def is_mine(self) -> bool:
        """Return True if the run's folder and spec belong to this process's user, or to root.

        Only then may this process write to the run's folder or run commands of its spec. Raises
        `OSError` if there is no spec.
        """
        return is_mine(self.directory.resolve()) and is_mine(self.spec)

    def journal_of(self, writer: str) -> Path:
        return self.journal / f"{writer}.jsonl"

    def metrics_of(self, attempt: int, launch: int) -> Path:
        """Return the file of the metrics that the program logged in one launch, as JSON lines."""
        return self.metrics / f"a{attempt:04d}.l{launch:02d}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

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

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the reserved attempts, in order."""
        return sorted(map(int, _names(self.attempts, _ATTEMPT)))

    def list_attempts(self) -> list[AttemptPaths]:
        """Return the reserved attempts, in order of number."""
        return [self.attempt(number) for number in self.attempt_numbers()]

    def successor(self, number: int) -> SuccessorPaths:
        return SuccessorPaths(self.successors / f"{number:04d}")

    def consumer(self, number: int) -> ConsumerPaths:
        """Return the files of a start of a consumer, by its number."""
        return ConsumerPaths(self.consumers / f"{number:04d}")

    def newest_consumer(self) -> int:
        """Return the number of the last start of a consumer that was reserved; 0 without one."""
        return max(map(int, _names(self.consumers, _ATTEMPT)), default=0)

    def newest_successor(self) -> SuccessorPaths | None:
        """Return the successor that was reserved last; None if there never was one."""
        number = max(map(int, _names(self.successors, _ATTEMPT)), default=None)
        return None if number is None else self.successor(number)

    def list_checkpoint_names(self) -> list[CheckpointName]:
        """Return the names of all checkpoint directories, committed or not, oldest step first."""
        found = (CheckpointName.parse(name) for name in _names(self.checkpoints, _CHECKPOINT))
        known = (name for name in found if name is not None)
        return sorted(known, key=lambda name: (name.step, name.attempt, name.launch))

    def list_checkpoints(self) -> list[Path]:
        """Return all checkpoint directories, committed or not, oldest step first."""
        return [self.checkpoint(name) for name in self.list_checkpoint_names()]

    def removing(self, name: CheckpointName | str) -> Path:
        """Return the path of a deleted checkpoint's directory while its files are removed."""
        return self.checkpoints / f"{name}{REMOVING}"

    def list_removing(self) -> list[Path]:
        """Return the directories that interrupted deletions left behind."""
        return [self.checkpoints / name for name in sorted(_names(self.checkpoints, _REMOVING))]

    def list_journals(self) -> list[Path]:
        """Return every journal of the run: those of the run and those of each attempt."""
        return [path for path, _ in self.list_journals_of(self.attempt_numbers())]

    def list_journals_of(self, attempts: Iterable[int]) -> list[tuple[Path, int | None]]:
        """Return the journals of the run, and those of some attempts with the attempt's number."""
        own: list[tuple[Path, int | None]] = [(path, None) for path in _journals(self.journal)]
        return own + [(path, n) for n in attempts for path in _journals(self.attempt(n).journal)]


@dataclass(frozen=True)
class HeldRun(RunPaths):
    """A run with its checkpoint and tombstone folders held open, see `hold`."""

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
    """Hold open the folders that a deletion changes, so that replacing one has no effect.

    Raises `ForeignFileError` if another user's link is in the place of a folder.
    """
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(_hold(each, paths))
            for each in (paths.checkpoints, paths.tombstones)
        ]
        yield HeldRun(paths.directory, *held)


def real_folder(folder: Path) -> Path:
    """Return a run's folder `checkpoints` or `tombstones`, or the folder that its link leads to.

    A link of this user or root counts, and in another user's run one whose target belongs to the
    run's owner, as `checkpoint.directory` makes it. For any other link, this returns the link.
    """
    if folder.parent == HELD:
        return folder
    try:
        target = folder.parent / os.readlink(folder)
        # Decides whose links count. No other place does, see decision 64.
        if is_mine(folder):
            return target
        owners = {folder.parent.stat().st_uid, folder.lstat().st_uid, target.lstat().st_uid}
    except OSError:
        return folder
    return target if len(owners) == 1 else folder


def is_foreign(folder: Path) -> bool:
    """Return True if `folder` is a link that does not count, see `real_folder`."""
    return _is_link(real_folder(folder))


def _is_link(folder: Path) -> bool:
    return folder.parent != HELD and folder.is_symlink()


def base_of(folder: Path) -> Path:
    """Return the folder under which no link is followed to a file in a `real_folder`."""
    return folder if folder.parent == HELD else folder.parent


def _hold(folder: Path, paths: RunPaths) -> contextlib.AbstractContextManager[Path]:
    is_own = folder.is_symlink() and is_mine(folder)
    target = folder.resolve() if is_own else folder
    return held_folder(target, below=target.parent if is_own else paths.directory)


def folder_of(path: Path) -> Path:
    """Return the run's folder of a journal or document, judged by its path; else its own folder."""
    for up in (1, 2):
        if len(path.parents) > up + 1 and path.parents[up].name in {"attempts", "successors"}:
            return path.parents[up + 1]
    is_inside = path.parent.name in {"journal", "tombstones", "metrics"}
    return path.parents[1] if is_inside else path.parent


def precedence(paths: RunPaths) -> tuple[bool, int]:
    """Return a sort key for folders with the same uid. The lowest one is the real run.

    Any user can write another run's uid into a spec, and a copied folder has it too. This user's
    folder comes first, then the folder with the oldest spec. The file system sets that time
    (`ctime`), so it cannot be forged. Raises `OSError` if there is no spec.
    """
    return not is_mine(paths.directory), paths.spec.lstat().st_ctime_ns


def plain_checkpoint(path: Path | str) -> Path:
    """Return the path by which a run names its checkpoint: absolute, and without `latest`.

    A path in a run's `checkpoint.directory` becomes the one in the run's folder. No other link is
    followed, because a link in another user's folder could lead to an unrelated run.
    """
    plain = Path(os.path.abspath(Path(path).expanduser()))
    with contextlib.suppress(OSError):
        if plain.name == LATEST and CheckpointName.parse(target := os.readlink(plain)):
            plain = plain.with_name(target)
    with contextlib.suppress(OSError):
        # A link `run` alone proves nothing, since anyone can make one. The run's own `checkpoints`
        # must lead back to this folder, see decision 64.
        base = plain.parent.parent
        own = RunPaths(base / os.readlink(base / OF_RUN)).checkpoints
        if own.samefile(plain.parent):
            return own / plain.name
    return plain


def list_runs(root: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> list[RunPaths]:
    """Return the runs in `root`, by name: the folders with a `spec.json` visible to this user.

    Only folders whose name `is_wanted` are looked up.
    A name that begins with a dot is not a run's, such as that of a run that is being deleted.
    """
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        named = (e for e in entries if not e.name.startswith(".") and is_wanted(e.name))
        found = sorted(entry.path for entry in named if has_spec(Path(entry.path)))
    return [RunPaths(Path(path)) for path in found]


def has_spec(directory: Path) -> bool:
    """Return True if `directory` has an entry `spec.json` of any type."""
    try:
        (directory / "spec.json").lstat()
    except OSError:
        return False
    return True


def _journals(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _names(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of the folders in `directory` that match `pattern`, without links.

    `directory` itself may be a link that counts, see `real_folder`.
    """
    real = real_folder(directory)
    if _is_link(real) or not real.is_dir():
        return []
    with os.scandir(real) as entries:
        return [
            entry.name
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
