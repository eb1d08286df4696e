"""Resume of a session: rank 0 chooses, all ranks load, and one line reports what was restored.

Verification and fetches before that are divided over the ranks. Ranks that see the same directory
each take a share of its bytes or files: all ranks for a directory under the run's root, and the
ranks of a node for one on the node's own disk.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.contracts import errors
from holdfast.contracts.disk import filesystems, leases
from holdfast.contracts.disk.damage import Problems, describe_problems, find_problems, share_of
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import MANIFEST, checkpoint_id
from holdfast.contracts.disk.reading import read_again
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.history import load_events
from holdfast.trainer.data.order import SkipWindow, joined, parse_skips
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.loading.reader import load_state, open_together
from holdfast.trainer.loading.resume import Search
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.mirror import transfer
from holdfast.trainer.planning.layout import read_train_state
from holdfast.trainer.process.program import program_argv
from holdfast.trainer.process.standby import changed_variables
from holdfast.trainer.ranks import collective
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.state.run_state import FRAMEWORK, PROGRAM, Restored
from holdfast.trainer.state.train_state import TrainState

# Loads the checkpoint in a directory, with its manifest and train state. Returns what each rank
# restored, and notes for people. All ranks raise `DamagedCheckpointError` if it is damaged.
Load = Callable[[Path, Manifest, Mapping[str, Any]], tuple[list[Restored], Sequence[str]]]

CHOICES_MAX: Final = 100
FALLBACKS_MAX: Final = 100
# Work before a load that all ranks share, while no rank waits long in a collective.
#
# Rank 0 decides in a thread, and may ask all ranks to do a part of something. Each part runs in a
# thread too. Meanwhile all ranks meet in short rounds and compare how far they are. So a wait may
# last as long as the work progresses, and an error or the end of one rank is known to all at
# once.

# The interval between rounds grows with the duration of the work.
NAP_MIN_S: Final = 0.001
NAP_MAX_S: Final = 0.5
NAP_SHARE: Final = 0.1
STALLED_S: Final = collective.TIMEOUT.total_seconds()

T = TypeVar("T")


class _Call(IntEnum):
    """What rank 0 wants from the ranks in this round."""

    NOTHING = 0
    PART = 1
    RESULT = 2
    STALLED = 3


@dataclass(frozen=True)
class _Line:
    """What a rank sends in a round. `moved` is how much it has done, in bytes."""

    moved: int
    is_done: bool
    call: _Call


class Meter:
    """Counts bytes. Several threads call `add`."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count


class _Job:
    """A function that runs in a thread. `ended` is set when it has ended."""

    def __init__(self, act: Callable[[], Any], ended: threading.Event) -> None:
        self._act, self._ended = act, ended
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None
        # The process can end while a thread hangs in a read.
        threading.Thread(target=self._run, name="shared-work", daemon=True).start()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def _run(self) -> None:
        self.value, self.error = collective.attempt(self._act)
        self.is_done = True
        self._ended.set()


class SharedWork:
    """Parts of work for all ranks. `parts` has a function for each kind of part, by name.

    A function is called with a meter, which it moves as it works, and with what rank 0 gave to
    `divide`. If nothing moves on any rank for `stalled_s` seconds, all ranks raise an error.
    """

    def __init__(
        self,
        ranks: collective.ControlGroup,
        parts: Mapping[str, Callable[..., Any]],
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._ranks, self._parts, self._stalled_s = ranks, parts, stalled_s
        self._changed = threading.Event()
        self._meter = Meter()
        self._asked: tuple[str, tuple[Any, ...]] | None = None
        self._answers: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def divide(self, name: str, *given: Any) -> list[Any]:
        """Let every rank do its part `name`, and return the results by rank.

        Only the function that `lead` runs calls this. Raises the first error of a rank; damage
        comes before other errors, because it may have caused them.
        """
        self._asked = name, given
        self._changed.set()
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def lead(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0, and return its result on every rank. Every rank calls this.

        Raises the error of `decide` on every rank. Raises `AgreementError` on every rank if nothing
        moves any more.
        """
        leader = _Job(decide, self._changed) if self._ranks.rank == 0 else None
        try:
            result: T = self._meet(leader)
        except Exception as error:
            # The leader's thread may wait for an answer.
            self._answers.put(errors.HoldfastError(f"the ranks no longer work together: {error}"))
            raise
        return result

    def _meet(self, leader: _Job | None) -> Any:
        part: _Job | None = None
        began = moved_at = time.monotonic()
        before: list[_Line] = []
        while True:
            if leader is not None:
                self._nap(time.monotonic() - began)
            lines = self._ranks.gather(partial(self._line, leader, part, moved_at))
            call = lines[0].call
            if call is _Call.RESULT:
                return self._ranks.share(lambda: leader.result() if leader else None)
            if call is _Call.STALLED:
                raise self._stalled(lines)
            if call is _Call.PART:
                part, began = self._begin(), time.monotonic()
            elif part is not None and all(one.is_done for one in lines):
                self._answer(part, is_leading=leader is not None)
                part, began = None, time.monotonic()
            if lines != before:
                before, moved_at = lines, time.monotonic()

    def _nap(self, elapsed_s: float) -> None:
        self._changed.wait(min(NAP_MAX_S, max(NAP_MIN_S, elapsed_s * NAP_SHARE)))
        self._changed.clear()

    def _line(self, leader: _Job | None, part: _Job | None, moved_at: float) -> _Line:
        """Return this rank's line of a round. Rank 0's clock shows whether the work has stalled."""
        call = _Call.NOTHING
        if leader is not None:
            is_free = part is None
            if is_free and leader.is_done:
                call = _Call.RESULT
            elif is_free and self._asked:
                call = _Call.PART
            elif time.monotonic() - moved_at > self._stalled_s:
                call = _Call.STALLED
        return _Line(self._meter.count, part is None or part.is_done, call)

    def _begin(self) -> _Job:
        """Send what rank 0 asked for to all ranks, and begin this rank's part."""
        asked, self._asked = self._asked, None
        name, given = self._ranks.share(lambda: asked) or ("", ())
        return _Job(lambda: self._parts[name](self._meter, *given), self._changed)

    def _answer(self, part: _Job, *, is_leading: bool) -> None:
        """Give the results of all ranks to the function that asked for them."""
        own = (part.value, collective.portable(part.error))
        outcomes: list[tuple[Any, collective.PortableError | None]] = self._ranks.gather(
            lambda: own
        )
        if not is_leading:
            return
        failed = [error for _, error in outcomes]
        damage = [
            e if e and e[0] == errors.DamagedCheckpointError.__name__ else None for e in failed
        ]
        _, error = collective.attempt(
            lambda: collective.raise_first(part.error, damage if any(damage) else failed)
        )
        self._answers.put(error or [value for value, _ in outcomes])

    def _stalled(self, lines: list[_Line]) -> errors.AgreementError:
        """Return the error for work that does not progress. It names the ranks."""
        # Between two parts, all wait for the decision of rank 0.
        waiting = [str(rank) for rank, one in enumerate(lines) if not one.is_done] or ["0"]
        return errors.AgreementError(
            f"ranks that prepare the resume have read nothing for {self._stalled_s:.0f} s: "
            f"{', '.join(waiting)}; expected progress. The storage or the mirror may hang: look at "
            "these ranks' stacks and at the logs of their nodes, then start again"
        )


class Preparation:
    """What rank 0 asks of all ranks while it chooses a checkpoint. All ranks create it.

    Only the function that `lead` runs calls `verify` and `fetch`.
    """

    def __init__(self, identity: Identity, ranks: collective.ControlGroup, tiers: Tiers) -> None:
        self._identity, self._tiers = identity, tiers
        self._place = (identity.rank, identity.world_size)
        if tiers.local:
            self._place = (identity.local_rank, identity.local_ranks)
        parts: dict[str, Callable[..., Any]] = {
            "verify": self._verify_share,
            "begin": self._begin_fetch,
            "fetch": self._fetch_share,
            "finish": self._finish_fetch,
        }
        self._work = SharedWork(ranks, parts)

    def lead(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0 and return its result on every rank; see `SharedWork.lead`."""
        return self._work.lead(decide)

    def verify(self, directory: Path, manifest: Manifest) -> list[str]:
        """Return a line for each damaged file, as `find_damage` does. Every rank reads a share."""
        return describe_problems(manifest, self._work.divide("verify", directory, manifest))

    def fetch(self, remote: transfer.Remote, directory: Path, url: str) -> int:
        """Copy a checkpoint of the mirror into `directory`. Return the bytes read for node 0.

        With a node-local tier, each node copies it to its own disk. Raises as
        `mirror.transfer.fetch`, if one rank cannot fetch its share.
        """
        began = time.monotonic()
        self._work.divide("begin", remote, directory)
        counts = self._work.divide("fetch", remote, directory, url)
        self._work.divide("finish", remote, directory, url, time.monotonic() - began)
        return sum(counts)

    def _verify_share(self, meter: Meter, directory: Path, manifest: Manifest) -> Problems:
        share = self._identity.rank, self._identity.world_size
        return find_problems(directory, manifest, progress=meter.add, share=share)

    def _begin_fetch(self, _: Meter, remote: transfer.Remote, directory: Path) -> None:
        if self._place[0] == 0:
            transfer.begin_fetch(remote, self._directory(remote, directory))

    def _fetch_share(self, meter: Meter, remote: transfer.Remote, directory: Path, url: str) -> int:
        every = remote.manifest.files
        files = share_of(every, [entry.bytes for entry in every], *self._place)
        if not files:
            return 0
        retries = transfer.Retries()
        store = retries.do(transfer.open_store, url)
        place = self._directory(remote, directory)
        count = transfer.fetch_files(
            store, remote, files, place, retries=retries, progress=meter.add
        )
        return 0 if self._tiers.local and self._identity.node else count

    def _finish_fetch(
        self, _: Meter, remote: transfer.Remote, directory: Path, url: str, seconds: float
    ) -> None:
        if self._place[0] == 0:
            transfer.finish_fetch(
                remote, self._directory(remote, directory), url=url, seconds=seconds
            )

    def _directory(self, remote: transfer.Remote, shared: Path) -> Path:
        """Return where this node's ranks write the files: `shared`, or on the node's own disk."""
        folder = self._tiers.node_folder(self._identity.run, self._identity.run_uid)
        return shared if folder is None else folder.checkpoint(remote.name)


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
    ranks: collective.ControlGroup,
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
            if choice.manifest is not None:
                # If this process ends in the load, the line tells from which checkpoint.
                recorder.event(
                    EventKind.LOADING, checkpoint=choice.checkpoint, step=choice.manifest.step
                )
                recorder.flush()
            try:
                found, restored, notes = _restore(choice, load, begins_at)
            except errors.DamagedCheckpointError as error:
                if choice.directory is None:
                    raise
                passed[choice.directory] = f"damaged: {'; '.join(error.damaged) or error}"
                continue
        if ranks.rank == 0:
            load_s = round(time.monotonic() - began, 6)
            _report(context, found, restored, choice.skipped, notes, load_s, recorder)
        return found
    raise errors.DamagedCheckpointError(
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
    ranks: collective.ControlGroup,
    state: TrainState,
    directory: Path,
    manifest: Manifest,
    document: Mapping[str, Any],
) -> tuple[list[Restored], Sequence[str]]:
    """Load a checkpoint in the format of DCP into `state`: see `Load`. Every rank calls this.

    Raises `CheckpointError` if another framework wrote it.
    """
    if framework := document.get(FRAMEWORK):
        raise errors.CheckpointError(
            f"{directory}: {framework} wrote this checkpoint, in its own files, and this "
            f"program uses Session. Use the session of {framework}, or begin another run"
        )
    return load_opened(ranks, state, open_together(directory, ranks.group, manifest), document)


def load_opened(
    ranks: collective.ControlGroup, state: TrainState, opened: Opened, document: Mapping[str, Any]
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
        except errors.KeyMismatchError as error:
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
        held.enter_context(leases.reading(choice.directory))
        if _is_gone(choice.directory / MANIFEST):
            continue
        try:
            document = read_train_state(choice.directory, choice.manifest)
        except errors.DamagedCheckpointError as error:
            passed[str(choice.directory)] = f"damaged: {'; '.join(error.damaged)}"
            continue
        name = checkpoint_id(choice.manifest.run, choice.manifest.name)
        # Only the checkpoint has the skip windows of the run from which this run was forked.
        skips = joined(skips, document.get("data", {}).get("skips", ()))
        directory = str(choice.directory)
        return _Choice(directory, choice.manifest, name, choice.skipped, skips, document)
    if read_before:
        raise errors.DamagedCheckpointError(
            f"{search.run.directory}: no checkpoint is whole, and the newest was read in part, so "
            f"the state of this process is incomplete. Skipped: {'; '.join(choice.skipped)}. "
            "Restore one from a copy, or fork a checkpoint of another run",
            damaged=choice.skipped,
        )
    return _Choice(None, None, None, choice.skipped, skips, {})


def _is_gone(manifest: Path) -> bool:
    """Return True if the manifest was deleted since. The load reports other storage errors."""
    try:
        return not read_again(lambda: filesystems.is_listed(manifest))
    except OSError:
        return False
