"""How long 1,024 played nodes need after the loss of one, until all have begun the next launch.

Run `python -m benchmarks.lost_nodes [--nodes N] [--spares N] [--history LINES] [--json]`. One
process plays the nodes, each in a thread: its channel, the agents' decisions and the lead are real,
and its ranks take the seconds of `benchmarks/played_nodes.py`. Each node's journal has LINES lines
in each of two attempts. First a node other than node 0 is lost, then, in a second attempt, node 0.

`other_s` and `lead_s` are the seconds from the loss to the last node's start, without the nodes'
own work. `quiet_s` of `lead_s` is the wait for heartbeats to stop. `reads` are the files that nodes
opened to read them: the most of any node, the mean of the others, and of all together.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from benchmarks.played_nodes import DRAIN_S, KILL_S, RANKS, START_S, HereNode, played_record

from holdfast.contracts.disk import reading
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.node.channel import ChannelHost, ChannelMember
from holdfast.contracts.records.documents import (
    Claim,
    Request,
    create_document,
    write_document,
)
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.agent import lead as lead_module
from holdfast.workers.agent import leading as leading_module
from holdfast.workers.agent import member as member_module
from holdfast.workers.agent.context import AgentContext, NodePlace, load_context
from holdfast.workers.agent.lead import Lead, Succeeded
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.succession import quiet_s
from holdfast.workers.nodes.heartbeats import interval_s
from holdfast.workers.runs.request import build_request

WAIT_S: Final = 600.0
RECEIVE_S: Final = 5.0
STACK_BYTES: Final = 512 * 1024
STEADY_S: Final = 3.0
OWN_S: Final = KILL_S + DRAIN_S + START_S


class LostError(Exception):
    """This node is lost."""


class Reads:
    """Counts the files that each thread opens to read them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        real = reading.open_beneath

        def opened(path: Path | str, flags: int, **more: Any) -> int:
            self.counts[threading.current_thread().name] += not flags & (os.O_WRONLY | os.O_RDWR)
            return real(path, flags, **more)

        reading.open_beneath = opened


class Node(HereNode):
    """One node: its agent's thread, and what the agent knows of its ranks."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(number)
        self.job = job
        self.context = dataclasses.replace(job.context, node=number, host=f"n{number}")
        self.place = NodePlace(node=number, nodes=job.context.nodes)
        self.is_training = number < job.context.nodes
        self.heartbeat = SimpleNamespace(launch=0)
        self.is_lost = False
        self.member: ChannelMember | None = None
        self.host: ChannelHost | None = None

    @property
    def name(self) -> str:
        return self.context.host

    def start(
        self,
        launch: int,
        address: str,
        port: int,
        place: NodePlace | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        if self.is_lost:
            raise LostError
        time.sleep(START_S)
        self.do("start", {"launch": launch})
        self.place, self.is_training = place or self.place, True
        self.heartbeat.launch = launch
        self.job.begun[launch][self.number] = time.monotonic()

    def expect(self, term: int) -> None:
        if self.is_lost:
            raise LostError
        self.place = dataclasses.replace(self.place, term=term)

    def report(self) -> Any:
        if self.is_lost:
            raise LostError
        return super().report()

    def drain(self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False) -> bool:
        time.sleep(DRAIN_S)
        return True

    def follow(self) -> None:
        """Be a member, and the lead if it is this node's turn."""
        lead, path = 0, self.context.attempt.channel
        runtime: NodeRuntime | None = None
        own = cast(NodeRuntime, self)
        while True:
            self.member = member_module._join(self.context, path, runtime)
            try:
                self._serve(self.member)
                return
            except ConnectionError as error:
                self.member.close()
                if self.is_lost:
                    return
                found, host = member_module._without_lead(self.context, own, lead, error)
            if found is None:
                return
            if found.node == self.number:
                self.lead(Succeeded(found.number, host))
                return
            lead, runtime = found.node, own
            path = self.context.attempt.channel_of(found.number)

    def _serve(self, member: ChannelMember) -> None:
        while True:
            question = member.receive(RECEIVE_S)
            if self.is_lost:
                raise ConnectionError("lost")
            if question is None:
                continue
            kind = question.pop("kind")
            if kind == "start":
                place = NodePlace(**question["place"]) if question.get("place") else None
                self.start(question["launch"], "", 0, place)
                member.reply()
            elif kind == "expect":
                self.expect(question["term"])
                member.reply()
            else:
                answer, took_s = self.do(kind, question)
                time.sleep(took_s)
                member.reply(**answer)
            if kind == "finish":
                return

    def lead(self, succeeded: Succeeded | None = None) -> None:
        """Lead the attempt until it is over or this node is lost."""
        term = succeeded.term if succeeded else 1
        path = self.context.attempt.channel_of(term)
        self.host = ChannelHost(path, self.context.nodes_of_job)
        with JournalWriter(self.context.attempt.node_journal(self.number)) as journal:
            here = cast(NodeRuntime, self)
            lead = Lead(self.context, self.job.signals, journal, here, self.host)
            lead.health = SimpleNamespace(passes=lambda when: True)  # type: ignore[assignment]
            lead.root = SimpleNamespace(passes=lambda: True)  # type: ignore[assignment]
            try:
                with contextlib.suppress(LostError):
                    if succeeded is None:
                        lead.run()
                    else:
                        lead.take_over(succeeded, here)
            finally:
                self.host.close()
                lead.close()

    def lose(self) -> None:
        """End this node as the loss of its power does."""
        self.is_lost = True
        if self.host is not None:
            self.host.close()
        if self.member is not None:
            self.member.close()


class Job:
    """One attempt with all its nodes."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.signals = SignalBox()
        self.begun: dict[int, dict[int, float]] = {n: {} for n in range(1, 10)}
        self.nodes = [Node(self, number) for number in range(context.nodes_of_job)]
        names = [f"node-{node.number}" for node in self.nodes]
        acts = [self.nodes[0].lead, *(node.follow for node in self.nodes[1:])]
        self.threads = [
            threading.Thread(target=act, name=name, daemon=True)
            for name, act in zip(names, acts, strict=True)
        ]

    def wait_for(self, launch: int, nodes: int) -> float:
        """Wait until so many nodes have begun a launch; return when the last one did."""
        give_up = time.monotonic() + WAIT_S
        while len(self.begun[launch]) < nodes:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{len(self.begun[launch])} nodes began launch {launch}")
            time.sleep(0.05)
        return max(self.begun[launch].values())

    def lose(self, number: int) -> tuple[float, float]:
        """Lose a node; return the seconds to the last start, and the process's CPU seconds."""
        trains = self.context.nodes - (self.context.nodes_of_job == self.context.nodes)
        cpu_s, lost_at = time.process_time(), time.monotonic()
        self.nodes[number].lose()
        seconds = self.wait_for(2, trains) - lost_at
        return seconds, time.process_time() - cpu_s

    def end(self) -> None:
        for node in self.nodes:
            node.is_lost = True
        for node in self.nodes:
            node.lose()
        for thread in self.threads:
            thread.join(30.0)


def make_context(folder: Path, nodes: int, spares: int, lines: int) -> AgentContext:
    """Return node 0's context in attempt 2 of a run with that history."""
    supervision = {"standby_after_s": "off", "join_timeout_s": 300}
    resources = {"executor": "slurm", "nodes": nodes, "gpus_per_node": RANKS}
    elastic = {"min_gpus": RANKS, "max_gpus": nodes * RANKS}
    spec = RunSpec.model_validate(
        {
            "name": "played",
            "command": ["train.py"],
            "supervision": supervision,
            "resources": {**resources, "spare_nodes": spares},
            "elastic": elastic,
        }
    )
    run = RunPaths(folder / "played")
    record = played_record(folder, spec)
    for number in (1, 2):
        attempt = run.attempt(number)
        make_directory(attempt.directory)
        request = build_request(record, spec, attempt=number, gpus=nodes * RANKS, reason="first")
        write_document(run.spec, record)
        write_document(attempt.request, Request.model_validate(request.model_dump()))
        with JournalWriter(attempt.node_journal(0)) as journal:
            for step in range(lines):
                facts = {"attempt": number, "checkpoint": "step-1", "step": step}
                journal.append(EventKind.COMMITTED, durable=False, **facts)
        for node in range(1, nodes + spares):
            shutil.copyfile(attempt.node_journal(0), attempt.node_journal(node))
    create_document(run.attempt(2).claim, _claim())
    environment = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n0"}
    hosts = tuple(f"n{number}" for number in range(nodes + spares))
    return dataclasses.replace(load_context(run.attempt(2).request, environment), hosts=hosts)


def _claim() -> Claim:
    return Claim(
        job_id="77", pid=1, process_start_s=0.0, boot_id="", host="n0", claimed_at=time.time()
    )


def measure(nodes: int, spares: int, lines: int, reads: Reads) -> dict[str, Any]:
    """Lose another node in one attempt, and node 0 in another; return the figures."""
    figures: dict[str, Any] = {"nodes": nodes, "spares": spares, "history": 2 * lines}
    for what, number in (("other", min(2, nodes - 1)), ("lead", 0)):
        with tempfile.TemporaryDirectory(prefix="holdfast-lost-") as folder:
            job = Job(make_context(Path(folder), nodes, spares, lines))
            for thread in job.threads:
                thread.start()
            job.wait_for(1, nodes)
            time.sleep(STEADY_S)
            reads.counts.clear()
            seconds, cpu_s = job.lose(number)
            found = sorted(reads.counts.values())
            job.end()
        figures[f"{what}_s"] = round(seconds - OWN_S, 2)
        figures[f"{what}_cpu_s"] = round(cpu_s, 1)
        figures[f"{what}_reads"] = _reads_of(found)
    every_s = interval_s(job.context.request.supervision.heartbeat_s, nodes + spares)
    figures["quiet_s"] = round(quiet_s(every_s), 2)
    return figures


def _reads_of(counts: Sequence[int]) -> list[float]:
    others = counts[:-1] or [0]
    return [max(counts, default=0), round(statistics.mean(others), 1), sum(counts)]


def main() -> None:
    """Measure with the given number of spare nodes, or without and with one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1024, help="how many nodes train")
    parser.add_argument("--spares", type=int, action="append", help="how many spare nodes wait")
    parser.add_argument("--history", type=int, default=20, help="lines of a node's journals")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(STACK_BYTES)
    # The job's scheduler is not asked to end anything.
    leading_module.end_job = lambda context: None
    lead_module.RESTART_PAUSE_S = 0.0  # type: ignore[misc]
    reads = Reads()
    rows = []
    for spares in options.spares or (0, 1):
        row = measure(options.nodes, spares, options.history, reads)
        rows.append({**row, "load": round(os.getloadavg()[0], 1)})
        if not options.json:
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
