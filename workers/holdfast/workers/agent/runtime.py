"""What an agent does on its own node; node 0's agent requests it of the others by channel."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node.agreement import StatusPort
from holdfast.contracts.node.rank_status import NOWHERE, RankStatusTable
from holdfast.contracts.records.protection import COPIES, ProtectionNotes
from holdfast.contracts.spec.secrets import plain_part
from holdfast.workers.agent.context import AgentContext, NodePlace
from holdfast.workers.agent.guard import adopt_orphans, is_running, kill_all_below
from holdfast.workers.agent.health.checks import HealthChecks
from holdfast.workers.agent.health.gpus import GpuHealth
from holdfast.workers.agent.launch import warm_standby
from holdfast.workers.agent.launch.command import Handles, place_environment
from holdfast.workers.agent.launch.flusher_supervisor import AgentFlusherSupervisor
from holdfast.workers.agent.launch.torchrun import Torchrun
from holdfast.workers.agent.node import CopyRound, CrashReport, NodeReport
from holdfast.workers.agent.notices.watch import NoticeWatch
from holdfast.workers.agent.watch.heartbeat import Heartbeat, earlier_times, oom_kills
from holdfast.workers.agent.watch.program_watch import ProgramWatch
from holdfast.workers.agent.watch.rank_watch import RankWatch
from holdfast.workers.agent.watch.stacks import StackTaker, StackTarget
from holdfast.workers.decisions.causes import RankFailure, SaveFailure
from holdfast.workers.nodes.heartbeats import RankBeat
from holdfast.workers.nodes.root_probe import RootProblem, check_folder, race


class NodeRuntime(StatusPort):
    """This node: its status table, flusher, heartbeat and, during a launch, torchrun."""

    def __init__(self, context: AgentContext) -> None:
        adopt_orphans()
        self.context = context
        # As the current launch sees this node. Its place changes when nodes are lost.
        self._placed, self.place = context, NodePlace(node=context.node, nodes=context.nodes)
        self.name = context.host
        self.status_table, self._status_handle = RankStatusTable.create(
            context.request.ranks_per_node
        )
        super().__init__(self.status_table)
        self.flusher_supervisor = AgentFlusherSupervisor(context)
        self.flusher_supervisor.report_protection = self._note_protection
        first_rank = context.node * context.request.ranks_per_node
        self._watch = RankWatch(self.status_table, first_rank, earlier_times(context))
        self._torchrun: Torchrun | None = None
        is_watched = context.is_lead and context.request.program.is_watched
        self.program = ProgramWatch(context) if is_watched else None
        self._signalled: set[int] = set()
        self.heartbeat = Heartbeat(context, self.status_table, self._watch, self._program_beats)
        self._stacks = StackTaker()
        self._health = HealthChecks(context)
        self.check_health = self._health.start
        self._gpu_health = GpuHealth(self.heartbeat.gpus, context.request.health)
        supervision = context.request.supervision
        self._notices = NoticeWatch(
            supervision.notices,
            supervision.notices_url,
            {**os.environ, **plain_part(context.request.environment)},
            self.note,
        )
        self._refusal: RankFailure | None = None
        self._standby: warm_standby.WarmStandby | None = None
        self._released: warm_standby.WarmStandby | None = None
        self._place: warm_standby.Place | None = None
        self._oom_kills_before = 0
        self._salvaged_journaled = self._failed_journaled = 0
        self._is_stopping = self._is_told = False
        self._copied = CopyRound()
        self._protection = ProtectionNotes(COPIES, context.attempt.number, context.host)

    @property
    def step_s(self) -> float:
        """The duration in seconds of the slowest local rank's last step."""
        if self.program is not None:
            return self.program.step_s
        return max((record.step_time_s for record in self.status_table.records()), default=0.0)

    @property
    def commits(self) -> int:
        """How many checkpoints this node's flusher has committed."""
        return self.flusher_supervisor.commits

    def check_root(self, place: str, shared: str, token: str) -> list[RootProblem]:
        return check_folder(self.context.run.directory / place, shared, token)

    def race(self, shared: str, number: int) -> bool:
        return race(self.context.run.directory / shared, number)

    def start(
        self,
        launch: int,
        address: str,
        port: int,
        place: NodePlace | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self.heartbeat.end_launch()
        if place is not None:
            self._move(place, launch)
        self.flusher_supervisor.forget(launch - 1)
        self.flusher_supervisor.tend()
        self.status_table.reset()
        self._watch.begin()
        self._gpu_health.begin()
        self._is_stopping = self._is_told = False
        self._signalled.clear()
        if self.program is not None:
            self.program.begin(launch)
        self.heartbeat.launch = launch
        self._oom_kills_before = oom_kills()
        self._refusal = None
        self._torchrun = self._release_standby(launch, address, port)
        if self._torchrun is None:
            self._launch(launch, address, port, is_alone=is_alone)

    @property
    def is_training(self) -> bool:
        """True if this node takes part in the newest launch that it knows."""
        return self.heartbeat.launch > 0

    def lead(self) -> None:
        """Write the heartbeats of all nodes from now on, in place of a lost lead."""
        self.heartbeat.lead()

    def _move(self, place: NodePlace, launch: int) -> None:
        """Take another place from `launch` on. Files of earlier launches are written by then."""
        self.place = place
        self._placed = self.context.at(place)
        self.flusher_supervisor.move(self._placed, launch)
        self._watch.move(place.node * self._placed.request.ranks_per_node)
        self.heartbeat.move(self._placed)

    def _launch(self, launch: int, address: str, port: int, *, is_alone: bool) -> None:
        """Start torchrun. What this node lacks for it is reported like a failure of the ranks."""
        try:
            if is_alone:
                self._place = warm_standby.Place()
                self._place.write(place_environment(self._placed, address, port))
                ports = self.context.request.supervision.port_range
                address, port = warm_standby.LOOPBACK, warm_standby.free_port(ports)
            self._torchrun = Torchrun(
                self._placed,
                launch,
                address=address,
                port=port,
                handles=self._handles(),
                place=self._place.path if self._place else "",
            )
        except HoldfastError as error:
            context = self._placed
            self._refusal = RankFailure(
                rank=context.node * context.request.ranks_per_node,
                exit_code=1,
                timestamp=time.time(),
                traceback=f"{type(error).__name__}: {error}",
                host=context.host,
            )

    def expect(self, term: int) -> None:
        self.place = replace(self.place, term=term)

    def protect(self, launch: int, node: int, holder: int) -> None:
        self.flusher_supervisor.protect(launch, node, holder)

    def copy(self, launch: int, round_: int, keep: int) -> None:
        self.flusher_supervisor.copy(launch, round_, keep)

    def prepare(self, launch: int, address: str, port: int) -> None:
        self._discard_standby()
        if warm_standby.has_memory_for(self.context.request.ranks_per_node):
            try:
                self._standby = warm_standby.WarmStandby(
                    self._placed, launch, address, port, self._handles()
                )
            except HoldfastError as error:
                self.note(f"no warm standby: {error}")
        else:
            self.note("no warm standby: the node has too little memory for one")

    def _handles(self) -> Handles:
        return Handles(self._status_handle, self.flusher_supervisor.place)

    def _release_standby(self, launch: int, address: str, port: int) -> Torchrun | None:
        """Return the torchrun of a warm standby for this launch and port; end any other standby."""
        standby = self._standby
        if standby is None or not standby.is_alive or not standby.fits(launch, port):
            self._discard_standby()
            return None
        self._standby, self._released = None, standby
        return standby.release(self._placed, address, port)

    def _discard_standby(self) -> None:
        if self._standby is not None:
            self._standby.discard()
        self._standby = None

    def _check_standby(self) -> int:
        """Return the launch for which a live warm standby waits, or 0 without one."""
        if self._standby is None:
            return 0
        if self._standby.is_alive:
            return self._standby.launch
        self._discard_standby()
        # The kernel kills a standby first, so its kill says nothing about the ranks.
        self._oom_kills_before = oom_kills()
        return 0

    def report(self) -> NodeReport:
        self.flusher_supervisor.tend()
        records = self.status_table.records()
        seen = [r for r in records if r.pid]
        program = self.program
        return NodeReport(
            exit_code=self._poll(),
            phases=program.phases if program else tuple(r.phase.name for r in seen),
            registered=len(seen),
            alive=sum(1 for r in seen if is_running(r.pid)),
            completed=max(
                (r.completed for r in seen), default=program.completed if program else NOWHERE
            ),
            resumed=max(
                (r.resumed_step for r in seen), default=program.resumed if program else NOWHERE
            ),
            entered=self.status_table.oldest_entered,
            asked=self.status_table.asked,
            notices=tuple(self._notices.take()),
            ranks=tuple(self._watch.statuses()),
            sample=self._stacks.sample,
            standby=self._check_standby(),
            copied=self._copied,
            health=self._health.finding,
            gpus=self._gpu_health.findings(),
        )

    def _poll(self) -> int | None:
        """Return torchrun's exit code. During a stop, all ranks get the time that it takes."""
        if self._refusal is not None:
            return self._refusal.exit_code
        if self._torchrun is None:
            return None
        if self._is_told:
            self.tell_program()
        if self._is_stopping:
            return self._torchrun.poll(peer_error_s=math.inf)
        return self._torchrun.poll()

    def tell_program(self) -> None:
        """Tell a program without a session to save and exit, also ranks that start only later."""
        self._is_told = True
        if self._torchrun is None or not self.context.request.program.is_watched:
            return
        self._torchrun.signal_program(self._signalled)
        if self.program is not None and self._signalled:
            self.program.stop()

    def _program_beats(self) -> tuple[RankBeat, ...]:
        """Return the part of a program without a session in a heartbeat."""
        if self.program is None or self._torchrun is None:
            return ()
        return self.program.beats(self._torchrun.rank_pids().get(0, 0))

    def announce(self, deadline: float | None) -> None:
        self._is_stopping = True
        self.status_table.announce_stop(deadline)
        self.tell_program()

    def take_stacks(self, dump: int, number: int) -> None:
        records = zip(self._watch.statuses(), self.status_table.records(), strict=True)
        silent = self._torchrun.rank_pids() if self._torchrun else {}
        targets = [
            StackTarget(rank=status.rank, pid=pid, offer=record.stacks_offer)
            for local, (status, record) in enumerate(records)
            if (pid := status.pid or silent.get(local, 0))
        ]
        folder = self.context.attempt.dump(self.context.node, dump)
        self._stacks.take(targets, folder, dump, number)

    def kill(self) -> None:
        self._health.cancel()
        # The ranks themselves journaled earlier failures.
        self._failed_journaled = len(self.flusher_supervisor.flushed.failed)
        if self._torchrun is not None:
            exit_code = self._torchrun.poll()
            self._torchrun.kill()
            # If the guard was killed, this process must end what the guard watched.
            exempt = {self.flusher_supervisor.pid, self._standby.pid if self._standby else None}
            kill_all_below(os.getpid(), frozenset(pid for pid in exempt if pid))
            if self.program is not None:
                self.program.end(exit_code)
        if self._released is not None:
            self._released.close()
            self._released = None
        if self._place is not None:
            self._place.close()
            self._place = None

    def drain(self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False) -> bool:
        flushed = self.flusher_supervisor.flushed
        is_done = self.flusher_supervisor.drain(timeout_s, lost, mirror=mirror)
        if self.program is not None:
            is_done = self.program.drain(timeout_s) and is_done
        # The ranks are dead now, so this agent reports the saves that the lost node made impossible
        # and the snapshots that are now committed.
        if lost:
            failed = flushed.failed[self._failed_journaled :]
            self._failed_journaled += len(failed)
            self._journal_flushed(EventKind.SAVE_FAILED, failed)
        if all(place in lost for place in range(self._placed.node)):
            # The flusher salvages when the last rank dies, without waiting for this request.
            salvaged = flushed.salvaged[self._salvaged_journaled :]
            self._salvaged_journaled += len(salvaged)
            self._journal_flushed(EventKind.COMMITTED, salvaged, reason="crash")
        return is_done

    def acknowledge(self) -> None:
        self._notices.acknowledge()

    def note(self, text: str) -> None:
        """Journal a note about this node."""
        attempt, host = self.context.attempt, self.context.host
        with JournalWriter(attempt.node_journal(self.context.node)) as journal:
            journal.append(EventKind.NOTE, attempt=attempt.number, host=host, text=text)

    def _note_protection(self, message: dict[str, Any]) -> None:
        """Journal when a neighbour begins or ceases to hold copies of this node's snapshots.

        Called in the thread that reads the flusher's messages.
        """
        self._copied = CopyRound(
            launch=message["launch"],
            number=message["round"],
            step=message["step"],
            is_missed=message["is_missed"],
        )
        if message["is_missed"]:
            return
        problem = ""
        if message["problem"]:
            problem = f"no copy at node {message['holder']}: {message['problem']}"
        if facts := self._protection.change(message["launch"], problem):
            with JournalWriter(self.context.attempt.node_journal(self.context.node)) as journal:
                journal.append(EventKind.PROTECTION, **facts)

    def _journal_flushed(
        self, kind: EventKind, messages: Sequence[dict[str, Any]], **more: Any
    ) -> None:
        attempt, known = self.context.attempt, {"checkpoint", "step", "error", "bytes", "flush_s"}
        if not messages:
            return
        with JournalWriter(attempt.node_journal(self.context.node)) as journal:
            for message in messages:
                facts = {key: value for key, value in message.items() if key in known}
                journal.append(kind, attempt=attempt.number, **facts, **more)

    def crash_report(self) -> CrashReport:
        kills = oom_kills() - self._oom_kills_before
        if self._refusal is not None:
            return CrashReport(failures=[self._refusal], oom_kills=kills)
        if self._torchrun is None:
            return CrashReport(oom_kills=kills)
        failures = self._torchrun.failures()
        log = "" if failures else self._torchrun.log_tail()
        return CrashReport(
            failures=failures,
            oom_kills=kills,
            launch_log=log,
            failed_saves=self._failed_saves(),
            unwritten="" if failures else self._torchrun.unwritten_error(),
        )

    def _failed_saves(self) -> list[SaveFailure]:
        """Return the failed saves of the launch. The flusher reports them without any storage."""
        return [
            SaveFailure(step=int(message["step"]), error=str(message["error"]))
            for message in self.flusher_supervisor.flushed.failed
            if (name := CheckpointName.parse(str(message["checkpoint"])))
            and name.launch == self.heartbeat.launch
        ]

    def close(self) -> None:
        """End everything that this agent started; the flusher first finishes what is sealed."""
        self._notices.close()
        self._discard_standby()
        self.kill()
        if self.program is not None:
            self.program.close()
        self.flusher_supervisor.close()
        self.heartbeat.close()
        self._watch.close()
        self._stacks.close()
        kill_all_below(os.getpid())
        with contextlib.suppress(BufferError):
            self.status_table.close()
        os.close(self._status_handle)
