"""Prometheus metrics of runs that train, and of a server whose index or runs are gone."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, serving, wait_for
from tests.support.runs import RunFolder

from holdfast.api.hub import Hub
from holdfast.api.store import IndexStore
from holdfast.api.watch import Watch
from holdfast.contracts.states import AttemptState
from holdfast.lineage.index import Index
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, NodeBeat, RankBeat


def train(run: RunFolder, step: int) -> None:
    """Write node 0's heartbeat of attempt 1, whose rank has finished `step`."""
    rank = RankBeat(rank=0, step=step, phase="training", age_s=0.1, step_time_s=0.5, pid=7)
    beat = NodeBeat(
        node=0, host="node-a", time=time.time(), attempt=1, launch=1, agent_pid=6, ranks=(rank,)
    )
    writer = HeartbeatWriter(run.paths.attempt(1))
    writer.write([beat.model_dump(mode="json")])
    writer.close()


@pytest.fixture
def live(home: Path) -> RunFolder:
    """A run that trains and has not committed."""
    run = RunFolder(home / "runs", "new", "c" * 32)
    run.submit(1, 2, time.time())
    run.claim(1, time.time())
    run.launch(1, 1, 0, None)
    return run


@pytest.fixture
def served(home: Path, live: RunFolder, sample_runs: dict[str, RunFolder]) -> Iterator[Served]:
    with serving(home, sample_runs) as one:
        yield one


def figures(client: httpx.Client, run: str) -> dict[str, float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    found = re.findall(rf'^holdfast_(\w+){{run="{run}".*}} (\S+)$', answer.text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_the_step_is_the_last_trained_one(served: Served, live: RunFolder) -> None:
    with served.client() as client:
        wait_for(lambda: figures(client, "new"))
        before = figures(client, "new")
        assert (before["run_step"], before["run_running"]) == (0, 1)
        assert not before.keys() & {"run_committed_step", "run_committed_timestamp_seconds"}
        train(live, 105)
        wait_for(lambda: figures(client, "new")["run_step"] == 105)
        live.commit(60, 1, at=time.time())
        wait_for(lambda: "run_committed_step" in figures(client, "new"))
        after = figures(client, "new")
        assert (after["run_step"], after["run_committed_step"]) == (105, 60)


def test_a_deleted_run_is_no_unreadable_one(served: Served, live: RunFolder) -> None:
    with served.client() as client:
        wait_for(lambda: figures(client, "new"))
        shutil.rmtree(live.paths.directory)
        wait_for(lambda: "deleted" in client.get("/healthz").text)
        assert "\nholdfast_ingest_problems 0.0\n" in client.get("/metrics").text


def test_metrics_report_that_the_index_does_not_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.client() as client:
        assert "\nholdfast_index_up 1.0\n" in client.get("/metrics").text
        monkeypatch.setenv("HOLDFAST_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
        served.services.store.index.close()
        answer = client.get("/metrics")
        assert answer.status_code == 200, "an alert needs the metric"
        assert "\nholdfast_index_up 0.0\n" in answer.text
        assert "holdfast_ingest_lag_seconds " in answer.text


def test_the_index_counts_as_up_to_date_again_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    watch: Any = Watch(IndexStore(Index()), Hub(), ())
    watch.look()
    assert "database" in watch.problems
    assert watch.lag_s() is None
    monkeypatch.delenv("HOLDFAST_DATABASE_URL")
    watch.look()
    assert watch.problems == {}
    assert watch.lag_s() < 1


def test_a_run_that_has_ended_when_it_is_first_seen_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open pages learn of changes by events alone: they kept the totals from before the run."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    root, hub, now = tmp_path / "runs", Hub(), time.time()

    def end_one(name: str) -> None:
        run = RunFolder(root, name, name[0] * 32)
        run.submit(1, 1, now)
        run.finish(1, AttemptState.COMPLETED, None, 100, now)

    end_one("before")
    watch = Watch(IndexStore(Index()), hub, (root,))
    watch.look()
    assert [one.event for one in hub._recent] == [], "what is there at the start is no news"
    end_one("after")
    watch.look()
    assert [(one.event, one.run) for one in hub._recent][-1] == ("run", "a" * 32)


def test_a_change_that_is_announced_during_a_round_is_checked_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    # Ended runs are checked only if somebody announces a change.
    monkeypatch.setattr("holdfast.api.watch.QUIET_PER_ROUND_MAX", 0)
    run = RunFolder(tmp_path / "runs", "ended", "e" * 32)
    run.submit(1, 1, time.time())
    run.finish(1, AttemptState.COMPLETED, None, 100, time.time())
    store = IndexStore(Index())
    watch = Watch(store, Hub(), (tmp_path / "runs",))
    # As far as a thread is in `touch` when the round takes the announced changes.
    announce = watch._urgent.add
    watch.look()
    announce(run.paths.directory)
    watch.look()
    assert store.by_folder(run.paths.directory).uid == "e" * 32
