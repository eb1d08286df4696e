"""How long node 0 needs to lead 1 to 1,024 other nodes: real lead and channel, played nodes.

Run `python -m benchmarks.nodes [--members N] [--json]`. One process plays the agents of all other
nodes (`benchmarks/played_nodes.py`), each with 8 ranks, heartbeats, 0.2 ms of latency and the
seconds that work takes on a node. This process runs node 0's real lead. A first attempt crashes
once and is then stopped by a signal that another node receives. In a second attempt one node is
silent when the signal comes. Times are from the event to the last node, without the nodes' own
work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.played_nodes import (
    DRAIN_S,
    FLUSH_S,
    HEARTBEAT_S,
    KILL_S,
    RANKS,
    START_S,
    HereNode,
    played_record,
)

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.records.documents import Request, write_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.agent.context import AgentContext, load_context
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, interval_s
from holdfast.workers.runs.request import build_request

SIZES: Final = (1, 16, 64, 256, 1024)
STEADY_S: Final = 10.0
SETTLE_S: Final = 6.0
WAIT_S: Final = 120.0
GRACE_S: Final = 30.0
CRASHING, SIGNALLED, SILENT = 1, 1, 2

Mark = tuple[float, str, str, int]


@dataclass
class Attempt:
    """One played attempt: `tell` sends the players a command, `marks` are its events."""

    host: ChannelHost
    lead: Lead
    players: subprocess.Popen[str]
    journal: Path
    joined_s: float
    marks: list[Mark] = field(default_factory=list)
    ended_at: float = 0.0

    def tell(self, *words: object) -> None:
        assert self.players.stdin is not None
        print(*words, file=self.players.stdin, flush=True)

    def wait_for(self, kind: EventKind, count: int = 1) -> None:
        """Wait until node 0's journal has `count` events of this kind."""
        give_up = time.monotonic() + WAIT_S
        while sum(e.kind is kind for e in read_journal(self.journal)[0]) < count:
            if time.monotonic() > give_up:
                raise TimeoutError(f"no {kind} within {WAIT_S:.0f} s")
            time.sleep(0.1)

    def first(self, what: str, kind: str = "", *, after: float = 0.0) -> float:
        """Return when this happened first."""
        return min(at for at, *which, _ in self.marks if which == [what, kind] and at >= after)

    def last(self, what: str, kind: str, *, after: float, before: float = float("inf")) -> float:
        """Return when the last node had this happen for the first time."""
        seen: dict[int, float] = {}
        for at, *which, node in self.marks:
            if which == [what, kind] and after <= at < before:
                seen.setdefault(node, at)
        return max(seen.values())


class Beats:
    """Node 0's part in the heartbeats of the other nodes: it takes them and writes them all."""

    def __init__(self, context: AgentContext) -> None:
        self._every_s = interval_s(HEARTBEAT_S, context.nodes)
        self._writer = HeartbeatWriter(context.attempt)
        self._beats: dict[int, dict[str, Any]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, beat: dict[str, Any]) -> None:
        self._beats[int(beat["node"])] = beat

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._writer.write(list(self._beats.copy().values()))


@contextmanager
def attempt(folder: Path, members: int) -> Iterator[Attempt]:
    """Yield an attempt whose nodes have all joined and started; at the end, wait for its end."""
    context = make_context(folder, members)
    path = context.attempt.node_journal(0)
    host = ChannelHost(context.attempt.channel, members + 1)
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.played_nodes", str(context.attempt.channel)]
    players = subprocess.Popen(
        [*command, str(members)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with JournalWriter(path) as journal:
            here = cast(NodeRuntime, HereNode(0))
            lead = Lead(context, SignalBox(), journal, here, host)
            beats = Beats(context)
            lead.group.take_beat = beats.take
            host.wait_for_peers(WAIT_S)
            made = Attempt(host, lead, players, path, time.monotonic() - began)
            thread = threading.Thread(target=lead.run, daemon=True)
            thread.start()
            made.wait_for(EventKind.LAUNCH_STARTED)
            yield made
            thread.join(WAIT_S)
            made.ended_at = time.monotonic()
            made.tell("end")
            made.marks += [tuple(mark) for mark in json.loads(players.communicate(None, 60)[0])]
            lead.close()
            beats.close()
    finally:
        players.kill()
        players.wait()
        host.close()


def make_context(folder: Path, members: int) -> AgentContext:
    """Return node 0's context in an attempt of `members` + 1 nodes."""
    supervision = {"grace_s": GRACE_S, "standby_after_s": "off"}
    spec = RunSpec.model_validate(
        {"name": "played", "command": ["train.py"], "supervision": supervision}
    )
    run = RunPaths(folder / "played")
    record = played_record(folder, spec)
    make_directory(run.attempt(1).directory)
    write_document(run.spec, record)
    request = build_request(record, spec, attempt=1, gpus=1, reason="first")
    sized = request.model_copy(
        update={"nodes": members + 1, "gpus_per_node": RANKS, "nproc_per_node": RANKS}
    )
    write_document(run.attempt(1).request, Request.model_validate(sized.model_dump()))
    return load_context(run.attempt(1).request)


def measure(members: int) -> dict[str, Any]:
    """Play both attempts with this many other nodes, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="holdfast-nodes-") as folder:
        with attempt(Path(folder), members) as run:
            time.sleep(SETTLE_S)
            cpu_s, began = time.process_time(), time.monotonic()
            time.sleep(STEADY_S)
            lead_cpu = (time.process_time() - cpu_s) / (time.monotonic() - began)
            run.tell("crash", CRASHING)
            run.wait_for(EventKind.LAUNCH_STARTED, 2)
            time.sleep(SETTLE_S)
            run.tell("signal", SIGNALLED)
        figures = figures_of(run)
    if members > 1:
        with tempfile.TemporaryDirectory(prefix="holdfast-nodes-") as folder:
            with attempt(Path(folder), members) as quiet:
                time.sleep(SETTLE_S)
                quiet.tell("silent", SILENT)
                time.sleep(1.0)
                quiet.tell("signal", SIGNALLED)
            delay_s = announced_s(quiet) - figures["announce_s"]
            figures["silent_delay_s"] = round(max(0.0, delay_s), 3)
    return {"members": members, **figures, "lead_cpu": round(lead_cpu, 3)}


def figures_of(run: Attempt) -> dict[str, float]:
    crashed_at, signalled_at = run.first("crash"), run.first("signal")
    killing_at = run.first("asked", "kill", after=crashed_at)
    killed_at = run.last("answered", "kill", after=crashed_at, before=signalled_at)
    started_at = run.last("answered", "start", after=crashed_at)
    agreeing_at = run.first("asked", "newest", after=signalled_at)
    agreed_at = run.last("asked", "answer", after=signalled_at)
    found = {
        "join_s": run.joined_s,
        "announce_s": announced_s(run),
        "agree_s": agreed_at - agreeing_at,
        "kill_overhead_s": killed_at - killing_at - KILL_S,
        "crash_to_start_s": started_at - crashed_at - KILL_S - DRAIN_S - START_S,
        "stop_s": run.ended_at - signalled_at,
        "stop_overhead_s": run.ended_at - signalled_at - KILL_S - FLUSH_S,
        "silent_delay_s": 0.0,
    }
    return {name: round(value, 3) for name, value in found.items()}


def announced_s(run: Attempt) -> float:
    """Return the seconds from the signal until the last node that answers knew of the stop."""
    signalled_at = run.first("signal")
    silent = {node for _, what, _, node in run.marks if what == "silent"}
    asked = [
        at
        for at, what, kind, node in run.marks
        if (what, kind) == ("asked", "announce") and node not in silent
    ]
    return max(asked) - signalled_at


def main() -> None:
    """Measure and print a table, or one JSON object for `--members N --json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, action="append", help="how many other nodes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = [measure(members) for members in options.members or SIZES]
    if options.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    names = list(rows[0])
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


if __name__ == "__main__":
    main()
