"""A node of the attempt as node 0's agent leads it, and what a node reports to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from holdfast.contracts.node.agreement import NodePort
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.workers.agent.context import NodePlace
from holdfast.workers.agent.health.checks import HealthFinding
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.agent.watch.stacks import StackSample
from holdfast.workers.decisions.causes import Ending, RankFailure, SaveFailure, classify_crash
from holdfast.workers.decisions.gpu_faults import GpuFinding
from holdfast.workers.nodes.root_probe import RootProblem


@dataclass(frozen=True, kw_only=True)
class CopyRound:
    """How a node's last round of copies ended: its neighbour holds `step`, or -1.

    `is_missed`: the ranks had passed the round's step.
    """

    launch: int = 0
    number: int = -1
    step: int = -1
    is_missed: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node's state at one moment. Steps are `NOWHERE` until a rank has reported one.

    `registered` ranks have used the status table, and `alive` of them still run. Each rank has
    entered step `entered` or a later one. `asked` is the step about whose loss a rank asks all
    others to agree. `standby` is the launch for which a warm standby waits, or 0. `gpus` is what is
    wrong with its GPUs since the launch began.
    """

    exit_code: int | None
    phases: tuple[str, ...]
    registered: int
    alive: int
    completed: int
    resumed: int
    entered: int = NOWHERE
    asked: int = 0
    notices: tuple[Notice, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    sample: StackSample | None = None
    standby: int = 0
    host_address: str = ""
    copied: CopyRound = CopyRound()
    health: HealthFinding | None = None
    gpus: tuple[GpuFinding, ...] = ()

    @property
    def has_left(self) -> bool:
        """True if every registered rank has stopped or finished and its process has exited."""
        over = all(phase in {"STOP", "DONE"} for phase in self.phases)
        return self.registered > 0 and self.alive == 0 and over

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeReport:
        """Return the report in a message of the channel."""
        sample, health = data["sample"], data.get("health")
        return cls(
            **{
                **data,
                "phases": tuple(data["phases"]),
                "notices": tuple(Notice(**notice) for notice in data["notices"]),
                "ranks": tuple(RankStatus.from_json(rank) for rank in data["ranks"]),
                "sample": StackSample.from_json(sample) if sample else None,
                "health": HealthFinding(**health) if health else None,
                "copied": CopyRound(**data.get("copied", {})),
                "gpus": tuple(GpuFinding(**finding) for finding in data.get("gpus", ())),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as a message for the channel."""
        return {
            **vars(self),
            "notices": [asdict(notice) for notice in self.notices],
            "ranks": [rank.to_json() for rank in self.ranks],
            "sample": self.sample.to_json() if self.sample else None,
            "health": asdict(self.health) if self.health else None,
            "copied": asdict(self.copied),
            "gpus": [asdict(finding) for finding in self.gpus],
        }


@dataclass(frozen=True, kw_only=True)
class CrashReport:
    """What is known about the crash of one node or of all nodes.

    `launch_log` is the end of torchrun's log if it named no rank. `failed_saves` are those of the
    launch. `unwritten` says that the storage had no room for the error of a rank.
    """

    failures: list[RankFailure] = field(default_factory=list)
    oom_kills: int = 0
    launch_log: str = ""
    failed_saves: list[SaveFailure] = field(default_factory=list)
    unwritten: str = ""

    def classify(
        self, lost_nodes: Sequence[str] = (), unsaved: str = ""
    ) -> tuple[Ending, RankFailure | None]:
        """Return how training ended, and the rank that failed first."""
        return classify_crash(
            self.failures,
            oom_kills=self.oom_kills,
            lost_nodes=lost_nodes,
            launch_log=self.launch_log,
            unsaved=unsaved,
        )

    @classmethod
    def of_all(cls, crash_reports: Sequence[CrashReport]) -> CrashReport:
        """Merge several nodes' crash reports, with node 0's log first."""
        return cls(
            failures=[failure for report in crash_reports for failure in report.failures],
            oom_kills=sum(report.oom_kills for report in crash_reports),
            launch_log=next((r.launch_log for r in crash_reports if r.launch_log), ""),
            failed_saves=[save for report in crash_reports for save in report.failed_saves],
            unwritten=next((r.unwritten for r in crash_reports if r.unwritten), ""),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CrashReport:
        failures = [RankFailure(**failure) for failure in data["failures"]]
        failed_saves = [SaveFailure(**save) for save in data.get("failed_saves", ())]
        return cls(**{**data, "failures": failures, "failed_saves": failed_saves})


class LedNode(NodePort, Protocol):
    """One node of the attempt, as node 0's agent leads it.

    Node 0 itself answers immediately. Another node answers with a future, which may raise
    `ConnectionError`.
    """

    name: str

    def start(
        self,
        launch: int,
        address: str,
        port: int,
        place: NodePlace | None = None,
        *,
        is_alone: bool = False,
    ) -> object:
        """Start torchrun for a new launch. `place` is given if the node's place changes.

        If `is_alone`, torchrun runs without those of other nodes, and the ranks meet at `port`.
        """
        ...

    def expect(self, term: int) -> object:
        """Let the node know that it takes part in the first launch of a term, if that begins."""
        ...

    def protect(self, launch: int, node: int, holder: int) -> object:
        """Have the flusher copy the launch's snapshots to the flusher of node `holder`.

        `node` is the place of this node in the launch.
        """
        ...

    def copy(self, launch: int, round_: int, keep: int) -> object:
        """Have the flusher copy the first snapshot from step `round_` on to its neighbour.

        The copies of step `keep` stay until this one has arrived, too.
        """
        ...

    def prepare(self, launch: int, address: str, port: int) -> object:
        """Start a warm standby for a later launch, if there is enough memory for it.

        With an empty `address`, it gets its place and its port when the launch begins.
        """
        ...

    def check_root(
        self, place: str, shared: str, token: str
    ) -> Sequence[RootProblem] | Future[Sequence[RootProblem]]:
        """Return what the node cannot do in a folder of the run, see `root_probe.check_folder`.

        `place` is the folder's path in the run's folder.
        """
        ...

    def race(self, shared: str, number: int) -> bool | Future[bool]:
        """Create a name exclusively while other nodes do the same, see `root_probe.race`.

        `shared` is the path of the probe's folder in the run's folder.
        """
        ...

    def check_health(
        self, checks: Sequence[str], round_: int, meeting: dict[str, Any] | None = None
    ) -> object:
        """Start the health checks; a later report contains the result of this round.

        `meeting` says with which nodes this one runs the check `allreduce`.
        """
        ...

    def report(self) -> NodeReport | Future[NodeReport]:
        """Return the node's state."""
        ...

    def announce(self, deadline: float | None) -> object:
        """Announce to the ranks that they must stop by `deadline` (Unix seconds)."""
        ...

    def take_stacks(self, dump: int, number: int) -> object:
        """Start to take the stacks of all ranks; a later report contains them."""
        ...

    def kill(self) -> object:
        """Kill torchrun and every process below it."""
        ...

    def drain(
        self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False
    ) -> bool | Future[bool]:
        """Let the flusher commit sealed steps; return False if it did not finish in time.

        The files of the nodes in `lost` are not waited for. With `mirror`, the commits are copied
        to the mirror too.
        """
        ...

    def crash_report(self) -> CrashReport | Future[CrashReport]:
        """Return what is known about a crash; call it after `kill`."""
        ...

    def acknowledge(self) -> object:
        """Tell the node's cloud that it may take the node; call it only after the commit."""
        ...
