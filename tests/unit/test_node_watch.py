"""What the supervisor and `show` report of silent nodes, hangs and slow ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.records.alerts import noticed
from holdfast.flows.supervisor.supervise import NodeWatch
from holdfast.workers.nodes import heartbeats
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, NodeBeat


def beat(node: int, now: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"node": node, "host": f"n{node}", "time": time.time() + 7200.0}
    whole = NodeBeat(attempt=1, launch=1, agent_pid=1, monotonic_s=now, **facts)
    return whole.model_dump(mode="json")


def test_a_silent_node_and_a_wrong_clock_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = RunFolder(tmp_path, "tried", "u" * 32).submit(1, 2, 0.0)
    writer, known = HeartbeatWriter(attempt), {}
    journal = JournalWriter(tmp_path / "flow.jsonl")
    seconds = iter(range(20))
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    watch, words, silent_beats = NodeWatch(), [], 3
    for now in range(20):
        for node in (0, 1):
            if node == 0 or not 5 <= now < 15:
                known[node] = beat(node, float(now))
        writer.write(list(known.values()))
        words.append(watch.look(attempt, 1.0, journal))
    reported = {at: said for at, said in enumerate(words) if said}
    assert list(reported) == [0, 4 + silent_beats + 1, 15]
    assert [text.split()[-3:] for text in reported[0]] == [["one", "is", "wrong"]] * 2
    assert reported[8] == ["no more heartbeats from node-0001"]
    assert reported[15] == ["heartbeats again from node-0001"]
    events, _ = read_journal(tmp_path / "flow.jsonl")
    silences = [event.data for event in events if event.kind is EventKind.NODE_SILENT]
    assert [one["silent"] for one in silences] == [True, False]
    writer.close()


def event(at: float, kind: EventKind, **data: Any) -> Event:
    facts = {"attempt": 2, **data}
    return Event(writer="a", opening=1, sequence=int(at), time=at, kind=kind, data=facts)


def test_show_reports_a_crash_that_was_restarted_in_place() -> None:
    launches = [
        event(1, EventKind.LAUNCH_STARTED, launch=1),
        event(2, EventKind.LAUNCH_ENDED, launch=1, ending="crashed", last_step=186),
        event(3, EventKind.LAUNCH_STARTED, launch=2),
        event(4, EventKind.LAUNCH_ENDED, launch=2, ending="crashed", last_step=None),
    ]
    found = noticed(launches)
    assert [(one["at"], one["text"]) for one in found] == [
        (3, "launch 1 crashed at step 186 and was restarted in place")
    ]


def test_show_reports_each_finding_and_a_hang_once() -> None:
    first, second = ["attempts/0002/dumps/node-0000-01"], ["attempts/0002/dumps/node-0000-02"]
    slow = {"rank": 3, "own_s": 0.9, "peers_s": 0.4, "step_s": 1.0}
    found = noticed(
        [
            event(1, EventKind.HANG_SUSPECTED, finding="rank 1 waits", dumps=first),
            event(2, EventKind.STRAGGLER, **slow),
            event(3, EventKind.HANG_SUSPECTED, finding="rank 1 is missing", dumps=second),
            event(4, EventKind.HANG_CONFIRMED, finding="rank 1 is missing", dumps=second),
            event(5, EventKind.NODE_SILENT, nodes=["node-0003"], count=1, silent=True),
            event(6, EventKind.NOTE, text="nothing"),
            event(7, EventKind.NUMERICS, action="stop", reason="the loss of step 9 is nan"),
        ]
    )
    assert [one["at"] for one in found] == [1, 2, 4, 5, 7]
    assert found[4]["text"] == "stop: the loss of step 9 is nan"
    assert found[1]["text"] == "rank 3 is slow: 900 ms of compute per step, its peers 400 ms"
    assert (found[2]["text"], found[2]["dumps"]) == ("hung and ended: rank 1 is missing", second)
    assert found[3]["text"] == "heartbeats stopped: node-0003"
