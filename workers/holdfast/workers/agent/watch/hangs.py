"""Node 0's watch of silent ranks: it suspects, proves and confirms hangs.

For a suspicion every node takes stacks, and they are journaled. The suspicion ends when a rank
shows a sign of life. It is confirmed when the ranks have been silent for long enough and nothing
about them changed between samples. `silence` judges that. This module controls the order, the
number of samples and kept dumps, and how often suspicions may occur.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.documents import Request
from holdfast.workers.agent.watch import silence
from holdfast.workers.agent.watch.collectives import CollectiveBlame
from holdfast.workers.agent.watch.flight_recorder import MergedRecords
from holdfast.workers.agent.watch.nccl_ras import AnswerReader
from holdfast.workers.agent.watch.silence import RankStatus, Sample, SilenceLimits
from holdfast.workers.agent.watch.slowdowns import Slowdowns, SlowNode, describe
from holdfast.workers.agent.watch.stack_text import RankStack, find_blame
from holdfast.workers.agent.watch.stacks import StackSample
from holdfast.workers.agent.watch.step_times import LongSteps, StepTimes, describe_steps
from holdfast.workers.nodes.calibration import SLOW_FACTOR, SLOW_SHARE

# Find ranks that are slower than their peers, purely.
#
# Ranks that meet in collectives all take the same time for a step. What differs is how much of it
# each rank spends on its own work: the share of samples in which its main thread did not wait in
# the kernel for others (on a lock, a socket or a poll). The time of a step times this share is
# the rank's *own* time. Where ranks spin while they wait, as for a GPU, all shares are one and no
# rank is named.

TIMES_MIN: Final = 3
RANKS_MIN: Final = 2
# A rank without a sign of life for this many of its steps does not count as slow. It may hang.
STILL_STEPS: Final = 5
STILL_STEP_S: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank and the median of its peers, in seconds per step."""

    rank: int
    own_s: float
    peers_s: float
    step_s: float


def find_slow(statuses: Sequence[RankStatus]) -> list[Slow]:
    """Return the ranks whose own time is well above `SLOW_FACTOR` times their peers' median."""
    timed = [status for status in statuses if status.phase == "train" and status.step_s > 0]
    if len(timed) < RANKS_MIN:
        return []
    order = sorted(range(len(timed)), key=lambda number: timed[number].own_s)
    ordered = [timed[number].own_s for number in order]
    place_of = {number: place for place, number in enumerate(order)}
    found = []
    for number, status in enumerate(timed):
        peers_s = _median_without(ordered, place_of[number])
        matters = status.own_s - peers_s >= SLOW_SHARE * status.step_s
        if matters and status.own_s > SLOW_FACTOR * peers_s:
            found.append(
                Slow(rank=status.rank, own_s=status.own_s, peers_s=peers_s, step_s=status.step_s)
            )
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of all but the one at `place`; there must be at least one other."""
    count = len(ordered) - 1
    upper = count // 2
    lower = upper if count % 2 else upper - 1
    low, high = (ordered[n if n < place else n + 1] for n in (lower, upper))
    return low if lower == upper else (low + high) / 2


def are_stepping(statuses: Sequence[RankStatus]) -> bool:
    """Return True if no rank that trains has been silent for many of its steps."""
    return all(
        status.silent_s <= STILL_STEPS * max(status.step_s, STILL_STEP_S)
        for status in statuses
        if status.phase == "train" and status.step_s > 0
    )


class Stragglers:
    """Names a rank that was slow in `TIMES_MIN` checks in a row, once per launch."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._named: set[int] = set()

    def look(self, statuses: Sequence[RankStatus]) -> list[Slow]:
        """Return the ranks to name now; call it once for each window of `statuses`."""
        slow = {one.rank: one for one in find_slow(statuses)}
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        due = [one for rank, one in slow.items() if self._in_a_row[rank] >= TIMES_MIN]
        named = [one for one in due if one.rank not in self._named]
        self._named |= {one.rank for one in named}
        return named


# Taking stacks is bounded in time. A node that does not answer by then never counts as unchanged,
# so no launch is ended without its sample.
SAMPLE_S_MAX: Final = 30.0
# The gap between two samples is a share of the silence, within bounds. It varies, so that no
# periodic activity of a rank is missed.
GAP_SHARE: Final = 1 / 8
GAP_S_MAX: Final = 10.0
GAP_S_MIN: Final = 1.0
GAP_VARIES: Final = 0.618
# How many samples in a row must show no sign of life.
STILL_SAMPLES_MIN: Final = 5
# As many for a suspicion while no rank has registered.
START_STILL_SAMPLES: Final = 2
# A check of a rank takes microseconds. With thousands of ranks it is not done at every turn.
LOOK_S_MIN: Final = 0.25
LOOK_S_PER_RANK: Final = 1e-4
# After a pause this long, the agent and perhaps its ranks were stopped, as in a suspended machine.
# Earlier observations then prove nothing.
PAUSE_S: Final = 10.0
# After a false suspicion the next one is delayed. The delay doubles and is reset after a while.
QUIET_S: Final = 5.0
QUIET_DOUBLINGS_MAX: Final = 4
QUIET_FORGOTTEN_S: Final = 600.0
GROUNDLESS_KEPT: Final = 8
SILENT_NAMED_MAX: Final = 16
STRAGGLER_WINDOW_S: Final = 10.0


class WatchedNode(Protocol):
    """The part of a node that the watch uses."""

    @property
    def name(self) -> str: ...

    def take_stacks(self, dump: int, number: int) -> object:
        """Start to take a sample; a later report contains it."""
        ...


class WatchedReport(Protocol):
    """The part of a node's report that the watch uses."""

    @property
    def ranks(self) -> tuple[RankStatus, ...]: ...

    @property
    def sample(self) -> StackSample | None: ...


@dataclass
class _Suspicion:
    """One silence under examination. Times are monotonic seconds."""

    dump: int
    asked: int = 0
    asked_at: float = 0.0
    asked_statuses: list[RankStatus] = field(default_factory=list)
    taken: int = 0
    last: Sample | None = None
    still_since: float = 0.0
    still_samples: int = 0
    next_at: float = 0.0
    is_journaled: bool = False
    records: MergedRecords | None = None
    blame: CollectiveBlame | None = None
    answer: AnswerReader | None = None
    ras: str = ""


class HangWatch:
    """The watch of one attempt. The lead's loop calls `look` at every turn."""

    def __init__(self, request: Request, attempt: AttemptPaths, journal: JournalWriter) -> None:
        self.evidence: tuple[str, ...] = ()
        # The ranks of a confirmed hang that the others wait for, by the flight records.
        self.missing: tuple[int, ...] = ()
        # True if a rank of a confirmed hang waits for storage.
        self.is_on_storage = False
        self._is_on = request.supervision.hangs
        # A program that writes its own checkpoints has no session, so no rank ever registers.
        self._has_session = not request.program.is_watched
        self._silence_limits = SilenceLimits(request.supervision.silence_s)
        self._world_size = request.world_size
        self._ranks_per_node = request.ranks_per_node
        self._attempt, self._journal = attempt, journal
        self._launch = 0
        self._open: _Suspicion | None = None
        self._groundless: list[int] = []
        self._quiet_until = 0.0
        self._doublings = 0
        self._stragglers, self._slowdowns = Stragglers(), Slowdowns()
        self._slowdown = request.health.slowdown
        # The nodes of this launch that are slow now, and since when they have been named.
        self.slow: dict[str, tuple[SlowNode, float]] = {}
        # Steps that take longer than usual now, and since when.
        self.long_steps: tuple[LongSteps, float] | None = None
        self._step_times = StepTimes()
        # How long no rank had registered when that was last examined.
        self._start_examined_s = 0.0
        self._straggler_at = 0.0
        self._looked_at = self._awake_since = time.monotonic()

    def begin(self, launch: int, world_size: int | None = None) -> None:
        """Start a new launch without suspicions, of `world_size` ranks if that has changed."""
        self._world_size = world_size or self._world_size
        self._launch, self._open, self.evidence, self.missing = launch, None, (), ()
        self.is_on_storage = False
        self._start_examined_s = 0.0
        self._stragglers, self._slowdowns = Stragglers(), Slowdowns()
        self.slow, self.long_steps, self._step_times = {}, None, StepTimes()
        self._looked_at = self._awake_since = time.monotonic()
        self._straggler_at = self._looked_at + STRAGGLER_WINDOW_S

    def look(self, nodes: Sequence[WatchedNode], reports: Mapping[str, WatchedReport]) -> bool:
        """Check once; return True with `evidence` if the ranks hang and must be ended.

        `reports` are the nodes' newest reports by name.
        """
        now = time.monotonic()
        if now - self._looked_at < max(LOOK_S_MIN, LOOK_S_PER_RANK * self._world_size):
            return False
        if now - self._looked_at > PAUSE_S:
            self._awake_since = now
        self._looked_at = now
        statuses = self._statuses(nodes, reports, now - self._awake_since)
        if not self._is_on or len(statuses) < self._world_size:
            return False
        self._name_slow(nodes, statuses, now)
        if not silence.have_registered(statuses):
            return self._look_at_start(nodes, reports, statuses, now)
        silent = silence.suspects(statuses, self._silence_limits)
        if self._open is None:
            if silent and now >= self._quiet_until:
                self._open = _Suspicion(dump=self._next_dump())
                self._ask(self._open, nodes, statuses, now)
            return False
        if self._open.asked > self._open.taken:
            return self._await_sample(self._open, nodes, reports, statuses, now)
        if not silent:
            self._close(statuses, now)
        elif now >= self._open.next_at:
            self._ask(self._open, nodes, statuses, now)
        return False

    def silent_s(self, nodes: Sequence[WatchedNode], reports: Mapping[str, WatchedReport]) -> float:
        """Return for how long all ranks have been silent, or 0.0 if that is usual for one of them.

        It counts without the proof that ends ranks, for a launch that ends otherwise.
        """
        if any(node.name not in reports for node in nodes):
            # The launch ends before each node has reported, so its ranks have just started.
            return 0.0
        awake_s = time.monotonic() - self._awake_since
        statuses = self._statuses(nodes, reports, awake_s) if nodes else []
        silent = silence.suspects(statuses, self._silence_limits)
        if not silent or len(silent) < len(statuses) or silence.have_left(statuses):
            return 0.0
        return min(status.silent_s for status in silent)

    def _look_at_start(
        self,
        nodes: Sequence[WatchedNode],
        reports: Mapping[str, WatchedReport],
        statuses: list[RankStatus],
        now: float,
    ) -> bool:
        """Examine ranks of which none has registered. They are suspected, and never ended.

        An import may hang, or the program has no session. Samples without a sign of life are a
        suspicion. After a sign of life, the next look comes when the silence has doubled.
        """
        silent = silence.silent_ranks(statuses, self._silence_limits)
        silent_s = max((status.silent_s for status in silent), default=0.0)
        open_ = self._open
        if open_ is None:
            if self._has_session and silent and silent_s >= 2 * self._start_examined_s:
                self._open = _Suspicion(dump=self._next_dump())
                self._ask(self._open, nodes, statuses, now)
        elif open_.asked > open_.taken:
            self._await_sample(open_, nodes, reports, statuses, now)
            shows_life = open_.taken > 1 and open_.still_samples == 0
            if open_.is_journaled or shows_life or open_.taken > STILL_SAMPLES_MIN:
                self._start_examined_s = math.inf if open_.is_journaled else silent_s
                if not open_.is_journaled:
                    self._groundless.append(open_.dump)
                self._open = None
        elif now >= open_.next_at:
            self._ask(open_, nodes, statuses, now)
        return False

    @staticmethod
    def _statuses(
        nodes: Sequence[WatchedNode], reports: Mapping[str, WatchedReport], awake_s: float
    ) -> list[RankStatus]:
        """Return the status of every rank. Silences count only while this process could run."""
        found = [status for node in nodes for status in reports[node.name].ranks]
        return [one if one.silent_s <= awake_s else replace(one, silent_s=awake_s) for one in found]

    # --- samples ----------------------------------------------------------------------------

    def _ask(
        self,
        open_: _Suspicion,
        nodes: Sequence[WatchedNode],
        statuses: list[RankStatus],
        now: float,
    ) -> None:
        """Have every node take the next sample at the same time."""
        open_.asked, open_.asked_at, open_.asked_statuses = open_.asked + 1, now, statuses
        for node in nodes:
            node.take_stacks(open_.dump, open_.asked)

    def _await_sample(
        self,
        open_: _Suspicion,
        nodes: Sequence[WatchedNode],
        reports: Mapping[str, WatchedReport],
        statuses: list[RankStatus],
        now: float,
    ) -> bool:
        """Judge a sample once it is complete or overdue; return True if the ranks hang."""
        wanted = (open_.dump, open_.asked)
        samples = [reports[node.name].sample for node in nodes]
        there = [s for s in samples if s is not None and (s.dump, s.number) == wanted]
        if len(there) < len(nodes) and now < open_.asked_at + SAMPLE_S_MAX:
            return False
        stacks = {stack.rank: stack for sample in there for stack in sample.stacks}
        if any(sample.asks_ras for sample in there):
            pids = {one.rank: one.pid for one in statuses if one.pid}
            open_.answer = AnswerReader(self._attempt, open_.dump, pids, self._world_size)
        self._tend_evidence(open_, stacks, statuses)
        sample = Sample(at=open_.asked_at, statuses=open_.asked_statuses, stacks=stacks)
        return self._judge(open_, sample, statuses, now)

    def _tend_evidence(
        self,
        open_: _Suspicion,
        stacks: Mapping[int, RankStack],
        statuses: Sequence[RankStatus],
    ) -> None:
        """Fetch what the flight records show, which the first sample took, and what RAS answers."""
        with_record = {
            one.rank // self._ranks_per_node for one in stacks.values() if one.has_record
        }
        if with_record and open_.records is None:
            folders = [self._attempt.dump(node, open_.dump) for node in sorted(with_record)]
            open_.records = MergedRecords(folders, self._world_size)
        before = open_.blame, open_.ras
        if open_.blame is None and open_.records is not None:
            open_.blame = open_.records.blame
        if not open_.ras and open_.answer is not None:
            open_.ras = open_.answer.finding
        if open_.is_journaled and before != (open_.blame, open_.ras):
            # The line before this one could not contain it yet.
            all_s = min(status.silent_s for status in statuses)
            self._journal_finding(EventKind.HANG_SUSPECTED, open_, statuses, all_silent_s=all_s)

    def _judge(
        self, open_: _Suspicion, sample: Sample, statuses: list[RankStatus], now: float
    ) -> bool:
        """Judge a sample against the previous one; return True if the ranks hang."""
        before, open_.last, open_.taken = open_.last, sample, open_.asked
        if before is None or silence.signs_of_life(before, sample):
            open_.still_since, open_.still_samples = sample.at, 0
        else:
            open_.still_samples += 1
        # Nobody says when ranks that import their program should have finished.
        have_registered = silence.have_registered(sample.statuses)
        is_clear = have_registered or open_.still_samples >= START_STILL_SAMPLES
        # Ranks that are exiting have no stacks left, and their silence is expected.
        has_stacks = any(stack.top for stack in sample.stacks.values())
        if is_clear and has_stacks and not open_.is_journaled:
            all_s = min(status.silent_s for status in statuses)
            self._journal_finding(EventKind.HANG_SUSPECTED, open_, statuses, all_silent_s=all_s)
            open_.is_journaled = True
        open_.next_at = now + self._gap_s(statuses, sample_number=open_.taken)
        if before is None or not have_registered or open_.still_samples < STILL_SAMPLES_MIN:
            return False
        still_s = sample.at - max(open_.still_since, self._awake_since)
        busy = silence.busy_ranks(before, sample)
        if (
            still_s <= 0
            or silence.left_to_wait_s(statuses, self._silence_limits, still_s, busy) > 0
        ):
            return False
        self._confirm(open_, statuses)
        return True

    def _gap_s(self, statuses: Sequence[RankStatus], sample_number: int) -> float:
        """Return the seconds until the next sample."""
        longest_s = max((status.silent_s for status in statuses), default=0.0)
        gap_s = min(GAP_S_MAX, max(GAP_S_MIN, GAP_SHARE * longest_s))
        return gap_s * (1 + sample_number * GAP_VARIES % 1) / 2

    # --- results ----------------------------------------------------------------------------

    def _confirm(self, open_: _Suspicion, statuses: Sequence[RankStatus]) -> None:
        dead = silence.dead_peers(statuses)
        longest_s = max(status.silent_s for status in statuses)
        reason = (
            f"every rank is silent, one for {longest_s:.0f} s, and no sample shows a sign of life"
        )
        if dead:
            reason = f"rank {dead[0].rank} is dead and the others wait for it"
        finding = self._journal_finding(EventKind.HANG_CONFIRMED, open_, statuses, reason=reason)
        dumps = ", ".join(self._dumps(open_, statuses))
        self.evidence = (reason, finding, f"stacks: {dumps}")
        self.missing = open_.blame.ranks if open_.blame and open_.blame.is_missing else ()
        stacks = open_.last.stacks.values() if open_.last else ()
        self.is_on_storage = any(stack.on_storage for stack in stacks)
        self._open = None

    def _journal_finding(
        self, kind: EventKind, open_: _Suspicion, statuses: Sequence[RankStatus], **more: Any
    ) -> str:
        """Journal what is known; return which ranks wait and which are missing."""
        silent = silence.suspects(statuses, self._silence_limits)
        worst = sorted(silent or statuses, key=lambda status: -status.silent_s)[:SILENT_NAMED_MAX]
        stacks = list(open_.last.stacks.values()) if open_.last else []
        finding = find_blame(stacks, {k.rank: k.step for k in statuses})
        if not silence.have_registered(statuses):
            finding = f"no rank has made a Session for {worst[0].silent_s:.0f} s; {finding}"
        if open_.blame is not None:
            finding = f"{finding}; by the flight records, {open_.blame.finding}"
            more["blamed"] = list(open_.blame.ranks)
        if open_.ras:
            finding = f"{finding}; {open_.ras}"
        self._journal.append(
            kind,
            attempt=self._attempt.number,
            launch=self._launch,
            silent=[
                {"rank": k.rank, "step": k.step, "phase": k.phase, "silent_s": k.silent_s}
                for k in worst
            ],
            finding=finding,
            dumps=self._dumps(open_, statuses),
            **more,
        )
        return finding

    def _close(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Close a false suspicion: a rank has shown a sign of life."""
        assert self._open is not None
        if self._open.is_journaled:
            self._journal.append(
                EventKind.HANG_CLEARED,
                attempt=self._attempt.number,
                launch=self._launch,
                dumps=self._dumps(self._open, statuses),
            )
        if now - self._quiet_until > QUIET_FORGOTTEN_S:
            self._doublings = 0
        self._quiet_until = now + QUIET_S * 2**self._doublings
        self._doublings = min(self._doublings + 1, QUIET_DOUBLINGS_MAX)
        self._groundless.append(self._open.dump)
        self._open = None
        for dump in self._groundless[:-GROUNDLESS_KEPT]:
            for folder in self._attempt.dumps.glob(f"node-*-{dump:02d}"):
                shutil.rmtree(folder, ignore_errors=True)
        del self._groundless[:-GROUNDLESS_KEPT]

    def _name_slow(
        self, nodes: Sequence[WatchedNode], statuses: Sequence[RankStatus], now: float
    ) -> None:
        """Journal ranks that are far slower than their peers, and nodes that are slow for long."""
        if now < self._straggler_at:
            return
        self._straggler_at = now + STRAGGLER_WINDOW_S
        if not are_stepping(statuses):
            # A rank that hangs spoils the times of all, and would be named as slow.
            self._stragglers.look([])
            return
        for slow in self._stragglers.look(statuses):
            self._journal.append(
                EventKind.STRAGGLER,
                attempt=self._attempt.number,
                launch=self._launch,
                rank=slow.rank,
                own_s=round(slow.own_s, 6),
                peers_s=round(slow.peers_s, 6),
                step_s=round(slow.step_s, 6),
            )
        if self._slowdown == "off":
            return
        for found in self._slowdowns.look(statuses, self._ranks_per_node):
            host = nodes[found.node].name
            asks = self._slowdown == "ask"
            self._journal.append(
                EventKind.NODE_SLOW,
                attempt=self._attempt.number,
                launch=self._launch,
                host=host,
                ranks=list(found.ranks),
                slow=found.is_slow,
                excess=round(found.excess, 3),
                cost_share=round(found.cost, 3),
                asks=asks,
                text=describe(found, host, asks=asks),
            )
        since = {host: at for host, (_, at) in self.slow.items()}
        named = {nodes[one.node].name: one for one in self._slowdowns.named()}
        self.slow = {host: (one, since.get(host, now)) for host, one in named.items()}
        self._name_long_steps(statuses, now)

    def _name_long_steps(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Journal that all ranks wait longer for long, as for a slow link, or no longer do."""
        found = self._step_times.look(statuses)
        if found is None:
            return
        self.long_steps = (found, now) if found.is_slow else None
        # If ranks work longer, the line about their node says so, or the work is heavier.
        if not found.all_wait:
            return
        self._journal.append(
            EventKind.LINK_SLOW,
            attempt=self._attempt.number,
            launch=self._launch,
            hosts=[],
            slow=found.is_slow,
            excess=round(found.excess, 3),
            asks=False,
            text=describe_steps(found, will_test=self._slowdown in {"ask", "act"}),
        )

    def _dumps(self, open_: _Suspicion, statuses: Sequence[RankStatus]) -> list[str]:
        """Return the dump's folders, relative to the run's folder."""
        nodes = sorted({status.rank // self._ranks_per_node for status in statuses})
        run = self._attempt.directory.parent.parent
        return [str(self._attempt.dump(n, open_.dump).relative_to(run)) for n in nodes]

    def _next_dump(self) -> int:
        """Return a number that no earlier suspicion of the attempt has used."""
        taken = [0, *self._groundless]
        with contextlib.suppress(OSError):
            taken += [int(path.name.rpartition("-")[2]) for path in _folders(self._attempt.dumps)]
        return max(taken) + 1


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("node-*-*") if path.name[-1].isdecimal()]
