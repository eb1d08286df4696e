"""When a supervisor logs a run's progress, and what it reads for that."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.history import load_history
from holdfast.flows.supervisor import summary
from holdfast.workers.nodes.heartbeats import NodeBeat, read_heartbeats

pytestmark = pytest.mark.usefixtures("home")


def test_heartbeats_are_read_only_for_a_line_that_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path, "kelp", "u" * 32)
    folder.submit(1, 2, 1_700_000_000.0)
    reads: list[int] = []

    def read(attempt: AttemptPaths) -> list[NodeBeat]:
        reads.append(attempt.number)
        return read_heartbeats(attempt)

    monkeypatch.setattr(summary, "read_heartbeats", read)
    log = logging.getLogger(__name__)
    shown = summary.ProgressLog(log)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        shown.show(load_history(folder.paths))
    assert (reads, len(caplog.messages)) == ([1], 1)
    folder.commit(10, 1)
    for _ in range(3):
        shown.show(load_history(folder.paths))
    assert (reads, len(caplog.messages)) == ([1, 1], 2), "a commit is logged at once"
    assert caplog.messages[-1].endswith("committed 10")
    monkeypatch.setattr(summary, "PROGRESS_S", 0.0)
    shown.show(load_history(folder.paths))
    assert (reads, len(caplog.messages)) == ([1, 1, 1], 3), "the time is up"
