"""When a supervisor logs a run's progress, and what it reads for that."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import AttemptState
from holdfast.flows import train
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


def test_what_prefect_shows_after_the_last_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "kelp", "u" * 32)
    folder.submit(1, 1, 1_700_000_000.0)
    folder.claim(1, 1_700_000_001.0)
    for step in range(1, 22):
        folder.commit(step, 1, world_size=1, at=1_700_000_001.0 + step)
    folder.finish(1, AttemptState.COMPLETED, None, 21, 1_700_000_100.0, world_size=1)
    history = load_tallied(folder.paths)
    assert train.state_name(history) == "Finishing"
    text = dict(train.artifacts(history))["run"].data
    assert "The newest 20 checkpoints; `holdfast lineage kelp` shows all." in text
    assert "- attempt 1 (1 rank): `step-00000002.a0001.l01`, " in text
