"""An operator drains nodes of an attempt, which leaves them at a step boundary."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import wait_until
from tests.process.test_lost_nodes import (
    SETTINGS,
    STEPS,
    assert_equal_bits,
    events,
    launches,
    ranks_of,
    uninterrupted,
)
from tests.support.played_nodes import PlayedJob

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.documents import Submission, write_document
from holdfast.contracts.states import AttemptState
from holdfast.workers.agent.lead import JOIN_WAIT_S
from holdfast.workers.runs.tending import tell_drained_nodes
from holdfast.workers.schedulers import slurm_client

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

REASON = "bad DIMM"


class PlayedController:
    """Answers of Slurm about the job and its nodes, for this process."""

    def __init__(self, folder: Path, job: PlayedJob, monkeypatch: pytest.MonkeyPatch) -> None:
        self._job, self._folder = job, folder
        self._folder.mkdir()
        name = job.run.history().attempts[0].request
        assert name is not None
        hosts = [f"n{node}" for node in range(len(job.agents))]
        row = f"77|RUNNING|None|{','.join(hosts)}|2026-01-01T00:00:00|N/A|n0|{name.job_name}"
        self._play("squeue", row)
        self._hosts = hosts
        self._show()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm_client, "CAPACITY_AGE_S", 0.0)
        write_document(
            job.attempt.submission,
            Submission(job_id="77", executor="slurm", submitted_at=time.time()),
        )

    def drain(self, *drained: str) -> None:
        """Drain these hosts, and do the supervisor's turns until it has seen that."""
        self._show(drained)
        wait_until(self._is_told, "the drain", 30)

    def _is_told(self) -> bool:
        self.tend()
        return self._job.attempt.drained.exists()

    def _show(self, drained: Sequence[str] = ()) -> None:
        self._play(
            "scontrol",
            "\n".join(
                f"NodeName={host} State=MIXED+DRAIN Reason={REASON} [root@2026-11-28T01:00:00]"
                if host in drained
                else f"NodeName={host} State=MIXED"
                for host in self._hosts
            ),
        )

    def tend(self) -> None:
        """Do what the supervisor does in each turn."""
        tell_drained_nodes(self._job.run.history())

    def _play(self, command: str, answer: str) -> None:
        path = self._folder / command
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
        path.chmod(0o755)


def slow(folder: Path) -> dict[str, Any]:
    """Settings of a run that does not end before a drain. It is quick once `hurry` exists."""
    return {**SETTINGS, "sleep_s": 0.15, "hurry": str(folder / "hurry")}


def notes(job: PlayedJob) -> list[str]:
    texts = [str(event.data["text"]) for event in events(job, EventKind.NOTE)]
    return [text for text in texts if "after a drain" in text]


def assert_left_at_a_boundary(job: PlayedJob, **expected: Any) -> None:
    """The second launch began after the last step of the first one, without the drained node."""
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    first, second = outcome.launches
    assert (first.ending, second.ending) == ("drained", "completed")
    assert second.first_step == (first.last_step or 0) + 1, "steps were lost"
    started = launches(job)[1]
    assert {key: started[key] for key in expected} == expected
    assert (started["lost"], started["reason"]) == ([], f"n1 ({REASON})")
    assert events(job, EventKind.NODE_LOST) == []


def test_a_spare_node_takes_the_place_of_a_drained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PlayedJob(tmp_path, nodes=2, spares=1, **slow(tmp_path)) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.run.wait_for_step(job.attempt, 10)
        slurm.tend()
        assert not job.attempt.drained.exists()
        slurm.drain("n1")
        assert job.wait(1) == 0, "its agent ends before the attempt"
        assert not job.attempt.outcome.exists()
        (tmp_path / "hurry").touch()
        assert (job.wait(0), job.wait(2)) == (0, 0)
    assert_left_at_a_boundary(job, way="spare", drained=["n1"], joined=["n2"], world_size=2)
    assert len(notes(job)) == 1
    assert_equal_bits(job.run, uninterrupted(tmp_path, 2), STEPS)


def test_an_elastic_run_leaves_a_drained_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = {"choices": [1, 2]}
    with PlayedJob(tmp_path, nodes=2, elastic=elastic, **slow(tmp_path)) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.run.wait_for_step(job.attempt, 10)
        slurm.drain("n1")
        assert job.wait(1) == 0
        (tmp_path / "hurry").touch()
        assert job.wait(0) == 0
    assert_left_at_a_boundary(job, way="shrink", drained=["n1"], joined=[], nodes=1)


@pytest.mark.parametrize("choices", [[2], [1, 2]], ids=["rigid", "elastic"])
def test_the_spare_node_is_lost_while_the_ranks_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: list[int]
) -> None:
    """The plan counted on it: no launch may be smaller than the spec allows."""
    elastic = {"choices": choices}
    with PlayedJob(tmp_path, nodes=2, spares=1, elastic=elastic, **slow(tmp_path)) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.run.wait_for_step(job.attempt, 10)
        # The last save waits for it.
        flusher = job.flusher_on(1)
        flusher.suspend()
        slurm.drain("n1")
        wait_until(lambda: events(job, EventKind.STOP_AGREED), "the agreement")
        job.kill_node(2)
        wait_until(lambda: events(job, EventKind.NODE_LOST), "the loss of the spare node")
        flusher.resume()
        (tmp_path / "hurry").touch()
        assert (job.wait(0), job.wait(1)) == (0, 0)
    outcome, last = job.run.outcome(job.attempt), launches(job)[-1]
    if len(choices) > 1:
        assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
        assert (last["way"], last["nodes"], last["world_size"]) == ("shrink", 1, 1)
    else:
        assert outcome.state is AttemptState.NODE_FAILED
        assert "no size of elastic fits 1 node" in " ".join(outcome.evidence)
        assert [one.ending for one in outcome.launches] == ["drained"]


def test_the_lead_is_lost_after_a_drained_node_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next lead neither waits for the nodes that were released nor reports them as lost."""
    with PlayedJob(tmp_path, nodes=2, spares=3, **slow(tmp_path)) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.run.wait_for_step(job.attempt, 10)
        slurm.drain("n1", "n4")
        assert (job.wait(1), job.wait(4)) == (0, 0)
        wait_until(lambda: ranks_of(job, 2), "the second launch")
        job.kill_node(0)
        killed_at = time.time()
        wait_until(lambda: len(launches(job)) == 3, "the third launch")
        (tmp_path / "hurry").touch()
        assert (job.wait(2), job.wait(3)) == (0, 0)
    started = events(job, EventKind.LAUNCH_STARTED)[-1]
    assert started.time - killed_at < JOIN_WAIT_S
    assert [event.data["host"] for event in events(job, EventKind.NODE_LOST)] == ["n0"]
    given = {key: started.data[key] for key in ("way", "lost", "joined")}
    assert given == {"way": "spare", "lost": ["n0"], "joined": ["n3"]}
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert_equal_bits(job.run, uninterrupted(tmp_path, 2), STEPS)


def test_a_drain_that_cannot_be_followed_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PlayedJob(tmp_path, nodes=2, spares=1, **slow(tmp_path)) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.run.wait_for_step(job.attempt, 10)
        # The node that leads, and the spare node, whose agent ends.
        slurm.drain("n0", "n2")
        assert job.wait(2) == 0
        wait_until(lambda: notes(job), "the note", 30)
        slurm.tend()
        (tmp_path / "hurry").touch()
        assert (job.wait(0), job.wait(1)) == (0, 0)
    outcome = job.run.outcome(job.attempt)
    assert [one.ending for one in outcome.launches] == ["completed"]
    assert notes(job) == [
        f"release after a drain: drained nodes: n0 ({REASON}); n0 leads the attempt"
    ]
