"""What the nodes of a large attempt read when its lead is lost: hardly anything, except one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk import reading
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records.documents import read_terms
from holdfast.workers.agent import leading, member, succession
from holdfast.workers.agent.context import AgentContext, NodePlace, load_context
from holdfast.workers.agent.losses import events_of_leads, gone_numbers, launches_before

NODES = 64
LOST = ConnectionError("node 0 is gone")


class Reads:
    """Counts the files of a run that this process opens to read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: list[str] = []
        real = reading.open_beneath

        def opened(path: Path | str, flags: int, **more: Any) -> int:
            if not flags & (os.O_WRONLY | os.O_RDWR):
                self._names.append(Path(path).name)
            return real(path, flags, **more)

        monkeypatch.setattr(reading, "open_beneath", opened)

    def take(self) -> Counter[str]:
        """Return the names of the files opened since the last call."""
        found, self._names = self._names, []
        return Counter(found)


def journals(names: Counter[str]) -> list[str]:
    return sorted(name for name in names.elements() if name.endswith(".jsonl"))


def attempt_of(folder: Path, lines: int, *, spares: int = 0, **spec: Any) -> list[AgentContext]:
    """The contexts of all nodes of an attempt in whose journals are `lines` lines each."""
    folder.mkdir()
    run = RunFolder(folder, "large", "1" * 32, spec)
    run.submit(1, NODES, 0.0)
    attempt = run.submit(2, NODES, 0.0)
    for paths in (run.paths.attempt(1), attempt):
        with JournalWriter(paths.node_journal(0)) as journal:
            for step in range(lines):
                facts = {"attempt": paths.number, "text": f"step {step}"}
                journal.append(EventKind.NOTE, durable=False, **facts)
        for node in range(1, NODES):
            shutil.copy(paths.node_journal(0), paths.node_journal(node))
    given = load_context(attempt.request)
    request = given.request.model_copy(update={"nodes": NODES, "spare_nodes": spares})
    context = dataclasses.replace(given, nodes=NODES, request=request)
    return [
        dataclasses.replace(context, node=node, host=f"n{node}") for node in range(NODES + spares)
    ]


def runtime(node: int) -> Any:
    place = NodePlace(node=node, nodes=NODES)
    return SimpleNamespace(
        is_training=node < NODES, place=place, kill=lambda: None, drain=lambda *_, **__: True
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for silent heartbeats takes no time."""
    now = [time.monotonic()]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    played = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(succession, "time", played)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("spares", [1, 0])
def test_one_node_reads_for_all_when_their_lead_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: int
) -> None:
    reads, counts = Reads(monkeypatch), []
    elastic = {"min_gpus": 1, "max_gpus": NODES}
    resources = {"executor": "slurm", "nodes": NODES, "gpus_per_node": 1}
    for lines in (1, 20):
        folder = tmp_path / f"{lines}"
        contexts = attempt_of(folder, lines, spares=spares, resources=resources, elastic=elastic)
        reads.take()
        each = []
        for context in contexts[1:]:
            found, _ = member._without_lead(context, runtime(context.node), 0, LOST)
            assert found is not None
            assert found.node == 1
            each.append(reads.take())
        assert [journals(names) for names in each[1:]] == [[]] * (len(each) - 1)
        # Only for a smaller size does it matter which checkpoints count.
        expected = [] if spares else ["flow.jsonl", *["node-0000.jsonl"] * 2]
        assert journals(each[0]) == expected
        counts.append([names.total() for names in each])
    assert counts[0] == counts[1]
    assert max(counts[0]) < 16


@pytest.mark.usefixtures("clock")
def test_one_node_reads_for_all_that_the_attempt_cannot_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(leading, "end_job", lambda context: ended.append(context.node))
    contexts, reads = attempt_of(tmp_path / "run", 1), Reads(monkeypatch)
    for context in contexts[1:]:
        assert member._without_lead(context, runtime(context.node), 0, LOST)[0] is None
        assert journals(reads.take()) == []
    assert ended == [1]
    assert read_terms(contexts[0].attempt) == (None, frozenset({1}))


def test_the_records_of_launches_are_read_from_the_leads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = attempt_of(tmp_path / "run", 1)
    attempt = contexts[0].attempt
    for node, launch in ((0, 1), (5, 2)):
        with JournalWriter(attempt.node_journal(node)) as journal:
            journal.append(EventKind.LAUNCH_STARTED, attempt=2, launch=launch)
            journal.append(EventKind.LAUNCH_ENDED, attempt=2, launch=launch, ending="crashed")
            journal.append(EventKind.NODE_LOST, attempt=2, node=launch + 6, host="n")
    assert succession.take_term(contexts[5], 2)
    reads = Reads(monkeypatch)
    events = events_of_leads(attempt)
    assert journals(reads.take()) == ["node-0000.jsonl", "node-0005.jsonl"]
    assert [one.number for one in launches_before(events, 2)[0]] == [1]
    assert launches_before(events, 2)[1] > 0
    assert gone_numbers(events) == {7, 8}
