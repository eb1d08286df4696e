"""The other nodes of `benchmarks/nodes.py`: one process plays all their agents.

They speak to the real node 0 over real connections, and answer as agents do: one question after
another, after the latency of a network and the time that the work takes on a node. Commands come as
lines on standard input; each arrival and answer is noted with its time.
"""

from __future__ import annotations

import heapq
import itertools
import json
import selectors
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.node.channel import ChannelMember
from holdfast.contracts.node.rank_status import Proposal
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.decisions.causes import RankFailure
from holdfast.workers.nodes.calibration import PhaseTimes
from holdfast.workers.nodes.heartbeats import NodeBeat, RankBeat, interval_s
from holdfast.workers.nodes.root_probe import RootProblem

RANKS: Final = 8
LATENCY_S: Final = 0.0002
STEP_S: Final = 1.0
# What the work takes on a node: torchrun's start, the end of its processes, and a flush.
START_S: Final = 0.05
KILL_S: Final = 0.24
DRAIN_S: Final = 0.05
FLUSH_S: Final = 5.0
HEARTBEAT_S: Final = 2.0
# An agent finds the end of its ranks within this time.
NOTICED_S: Final = 0.25
TIMES: Final = PhaseTimes(count=100, p50_s=STEP_S, p99_s=STEP_S * 1.1)


def played_record(folder: Path, spec: RunSpec) -> RunRecord:
    """Return the record of the run `played` in `folder`."""
    return RunRecord(
        uid="0" * 32,
        run="played",
        name="played",
        root=str(folder),
        created_at=time.time(),
        created_by="benchmark",
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
    )


@dataclass
class PlayedNode:
    """The state of one node's ranks."""

    number: int
    launch: int = 0
    began_at: float = 0.0
    exit_code: int | None = None
    is_stopping: bool = False
    has_left: bool = False
    is_silent: bool = False

    @property
    def name(self) -> str:
        return f"node-{self.number:04d}"

    @property
    def step(self) -> int:
        return int((time.monotonic() - self.began_at) / STEP_S) + 1

    def report(self) -> NodeReport:
        phase = "stop" if self.has_left else "train"
        ranks = tuple(
            RankStatus(
                rank=self.number * RANKS + local,
                pid=100_000 + local,
                step=self.step,
                phase=phase,
                silent_s=0.4,
                step_s=STEP_S,
                own_s=STEP_S * 0.8,
                cpu_s=123.456,
                io_bytes=123_456_789,
                times=TIMES,
            )
            for local in range(RANKS)
        )
        return NodeReport(
            exit_code=self.exit_code,
            phases=(phase.upper(),) * RANKS,
            registered=RANKS,
            alive=0 if self.has_left else RANKS,
            completed=self.step,
            resumed=0,
            entered=self.step,
            ranks=ranks,
            host_address="127.0.0.1",
        )

    def beat(self, every_s: float) -> dict[str, Any]:
        """Return a heartbeat as an agent sends it to node 0."""
        ranks = tuple(
            RankBeat(
                rank=self.number * RANKS + local,
                step=self.step,
                phase="train",
                age_s=0.4,
                step_time_s=STEP_S,
                pid=100_000 + local,
                step_p50_s=STEP_S,
                step_p99_s=STEP_S * 1.1,
                own_s=STEP_S * 0.8,
                rss_bytes=12_345_678_901,
                cpu_percent=101.5,
                threads=130,
                read_bytes=123_456_789_012,
                write_bytes=23_456_789_012,
            )
            for local in range(RANKS)
        )
        beat = NodeBeat(
            node=self.number,
            host=self.name,
            time=time.time(),
            attempt=1,
            launch=self.launch,
            agent_pid=4000,
            monotonic_s=time.monotonic(),
            every_s=every_s,
            ranks=ranks,
        )
        return beat.model_dump(mode="json", exclude_none=True)

    def do(self, kind: str, given: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the answer to a question, and the seconds that the work for it takes."""
        if kind == "start":
            self.launch, self.began_at, self.exit_code = given["launch"], time.monotonic(), None
            return {}, START_S
        if kind == "kill":
            return {}, KILL_S
        if kind == "drain":
            return {"done": True}, FLUSH_S if self.is_stopping else DRAIN_S
        if kind == "report":
            return self.report().to_json(), 0.0
        if kind == "crash_report":
            return self.crash_report().to_json(), 0.0
        if kind == "newest":
            return {"step": self.step}, 0.0
        if kind == "propose":
            return {"accepted": True}, 0.0
        if kind == "root":
            return {"problems": []}, 0.0
        if kind == "race":
            return {"won": False}, 0.0
        if kind == "announce":
            self.is_stopping = True
        if kind == "answer" and given["state"] == Proposal.GO:
            self.has_left = True
        return {}, 0.0

    def crash_report(self) -> CrashReport:
        if self.exit_code is None:
            return CrashReport()
        failure = RankFailure(
            rank=self.number * RANKS,
            exit_code=-9,
            timestamp=time.time(),
            traceback="",
            host=self.name,
        )
        return CrashReport(failures=[failure])


class Players:
    """All played nodes, in one thread."""

    def __init__(self, channel: Path, nodes: int) -> None:
        self._nodes = {number: PlayedNode(number) for number in range(1, nodes + 1)}
        self._members = {
            number: ChannelMember(channel, {"node": number, "host": node.name})
            for number, node in self._nodes.items()
        }
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ, 0)
        for number, member in self._members.items():
            self._selector.register(member.fileno(), selectors.EVENT_READ, number)
        self._busy: set[int] = set()
        self._waiting: set[int] = set()
        self._due: list[tuple[float, int, int, str, dict[str, Any]]] = []
        self._order = itertools.count()
        self._marks: list[tuple[float, str, str, int]] = []
        self._is_over = False
        self._beat_s = interval_s(HEARTBEAT_S, nodes + 1)
        for number in self._nodes:
            self._later(self._beat_s * number / nodes, number, "beat", {})

    def run(self) -> list[tuple[float, str, str, int]]:
        """Answer until `end` is read; return (monotonic time, what, kind, node) of each event."""
        while not self._is_over:
            left_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for key, _ in self._selector.select(left_s):
                if key.data:
                    self._receive(key.data)
                else:
                    self._obey(sys.stdin.readline().split())
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, number, kind, answer = heapq.heappop(self._due)
                self._send(number, kind, answer)
        return self._marks

    def _obey(self, words: list[str]) -> None:
        if not words or words[0] == "end":
            self._is_over = True
            return
        what, number = words[0], int(words[1])
        node = self._nodes[number]
        self._mark(what, "", number)
        if what == "silent":
            node.is_silent = True
        elif what == "signal":
            self._members[number].tell(signals=["SIGTERM"])
        elif what == "crash":
            node.exit_code = 1
            self._later(NOTICED_S, number, "", {"report": node.report().to_json()})

    def _receive(self, number: int) -> None:
        """Take a node's next question, or leave it until the last one is answered."""
        node, member = self._nodes[number], self._members[number]
        if number in self._busy:
            self._selector.unregister(member.fileno())
            self._waiting.add(number)
            return
        try:
            question = member.receive(0.0)
        except ConnectionError:
            self._selector.unregister(member.fileno())
            return
        if question is None:
            return
        kind = question.pop("kind")
        self._mark("asked", kind, number)
        self._busy.add(number)
        if not node.is_silent:
            answer, took_s = node.do(kind, question)
            self._later(took_s, number, kind, answer)

    def _send(self, number: int, kind: str, answer: dict[str, Any]) -> None:
        node, member = self._nodes[number], self._members[number]
        try:
            if kind == "beat":
                if not node.is_silent:
                    member.tell(beat=node.beat(self._beat_s))
                self._later(self._beat_s, number, "beat", {})
                return
            if not kind:
                member.tell(**answer)
                return
            member.reply(**answer)
        except ConnectionError:
            return
        self._mark("answered", kind, number)
        self._busy.discard(number)
        if number in self._waiting:
            self._waiting.discard(number)
            self._selector.register(member.fileno(), selectors.EVENT_READ, number)
        # The next question may have been received with the last one.
        self._receive(number)

    def _later(self, seconds: float, number: int, kind: str, answer: dict[str, Any]) -> None:
        at = time.monotonic() + LATENCY_S + seconds
        heapq.heappush(self._due, (at, next(self._order), number, kind, answer))

    def _mark(self, what: str, kind: str, number: int) -> None:
        self._marks.append((time.monotonic(), what, kind, number))


class HereNode(PlayedNode):
    """Node 0's own node, called by its agent directly."""

    step_s = STEP_S

    def start(self, launch: int, address: str, port: int, *, is_alone: bool = False) -> None:
        time.sleep(self.do("start", {"launch": launch})[1])

    def race(self, shared: str, number: int) -> bool:
        return True

    def check_root(self, place: str, shared: str, token: str) -> list[RootProblem]:
        return []

    def kill(self) -> None:
        time.sleep(KILL_S)

    def drain(self, timeout_s: float, lost: Any = (), *, mirror: bool = False) -> bool:
        time.sleep(min(timeout_s, self.do("drain", {})[1]))
        return True

    def announce(self, deadline: float | None) -> None:
        self.do("announce", {})

    def newest_entered(self) -> int:
        return self.step

    def propose(self, serial: int, step: int) -> bool:
        return True

    def answer(self, serial: int, state: Proposal) -> None:
        self.do("answer", {"state": state})

    def prepare(self, launch: int, address: str, port: int) -> None:
        """No standby."""

    def take_stacks(self, dump: int, number: int) -> None:
        """No stacks."""

    def acknowledge(self) -> None:
        """No cloud."""


def main() -> None:
    """Play the nodes; arguments: the channel's file and how many nodes. Prints the events."""
    marks = Players(Path(sys.argv[1]), int(sys.argv[2])).run()
    json.dump(marks, sys.stdout)


if __name__ == "__main__":
    main()
