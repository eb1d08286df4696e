"""What a supervisor does again and again costs as much as what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk import journal
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records import history_cache
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.history_cache import HistoryReader, load_tallied
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor import supervise
from holdfast.flows.supervisor.deliveries import Deliveries, _Look
from holdfast.flows.supervisor.service import SupervisorService
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import PRUNE_S, Ingestion, Supervisor
from holdfast.lineage.index import Index
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries.pages import list_events
from holdfast.workers.checkpoints import deletion
from holdfast.workers.checkpoints.retention import KeepVerdict

LOG = logging.getLogger("holdfast.test")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the number of journal lines that were parsed since the last call."""
    real, found = journal._parse, [0]

    def count(content: bytes) -> Any:
        found[0] += 1
        return real(content)

    def since() -> int:
        total, found[0] = found[0], 0
        return total

    monkeypatch.setattr(journal, "_parse", count)
    return since


def build(root: Path, saves: int, **spec: Any) -> RunFolder:
    folder = RunFolder(root, "kelp", "u" * 32, spec)
    folder.submit(1, 2, T0)
    folder.claim(1, T0 + 1)
    folder.launch(1, 1, 0, None)
    for step in range(1, saves + 1):
        folder.commit(step, 1)
    return folder


@pytest.mark.parametrize("saves", [3, 60])
def test_a_save_costs_the_same_in_a_young_and_an_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Callable[[], int], saves: int
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    folder = build(tmp_path / "runs", saves)
    reader = HistoryReader(folder.paths)
    reader.share()
    look = _Look(Deliveries(folder.paths, {}, LOG, None))
    given: list[int] = []
    with Index() as index:
        database = index.open()
        for _ in range(2):
            reader.load()
            ingest_run(database, folder.paths)
            look(lambda event: given.append(event.data.get("step", 0)))
        folder.commit(saves + 1, 1)
        # The journal's writer reads the end of its file.
        parsed()
        given.clear()
        reader.load()
        assert parsed() == 1
        ingest_run(database, folder.paths)
        assert parsed() == 1
        look(lambda event: given.append(event.data.get("step", 0)))
        assert (parsed(), given) == (0, []), "only the journals of this turn are looked at"
        deliveries = look._deliveries
        deliveries.offer(reader.load())
        look(lambda event: given.append(event.data.get("step", 0)))
        assert (parsed(), given) == (1, [saves + 1])
        newest = list_events(database, "kelp", limit=1).items[0]
        assert newest["data"]["step"] == saves + 1


def test_a_long_journal_reaches_the_index_in_several_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("holdfast.lineage.ingest.journal_lines.LINES_MAX", 7)
    folder = build(tmp_path / "runs", 40)
    folder.delete("step-00000002.a0001.l01", "keep.last 2: step 2 is older")
    with Index() as index:
        database = index.open()
        ingest_run(database, folder.paths)
        lines = list_events(database, "kelp", limit=500).items
        assert len(lines) == len(load_history(folder.paths).events)
        steps = [line["data"]["step"] for line in lines if line["kind"] == "committed"]
        assert sorted(steps) == list(range(1, 41))
        with database.reading() as connection:
            query = "SELECT deleted_reason FROM checkpoints WHERE name LIKE 'step-00000002%'"
            assert connection.exec_driver_sql(query).scalar() == "keep.last 2: step 2 is older"


def test_an_ended_run_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "runs", 2)
    folder.finish(1, AttemptState.CANCELLED, Cause.OPERATOR, 2, T0 + 50)
    read: list[str] = []

    def load(paths: RunPaths) -> Any:
        read.append(paths.name)
        return load_tallied(paths)

    monkeypatch.setattr(history_cache, "load_tallied", load)
    found = SupervisorService(tmp_path / "runs", Index(), LOG)
    assert [found._is_live(folder.paths) for _ in range(3)] == [False] * 3
    assert len(read) == 1
    folder.tell(
        "orders", EventKind.OPERATOR_REQUEST, action="relaunch", by="ann", order=1, after_attempt=1
    )
    assert found._is_live(folder.paths)
    assert len(read) == 2


def test_pruning_looks_at_new_commits_and_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "runs", 3, checkpoint={"keep": {"last": 2}})
    supervisor = Supervisor(folder.paths, Index(), LOG, submit_next)
    supervisor.is_acting = True
    looks: list[RunPaths] = []
    monkeypatch.setattr(deletion, "_deleted_here", looks.append)
    now = [time.monotonic()]
    monkeypatch.setattr("holdfast.flows.supervisor.supervise.time.monotonic", lambda: now[0])
    supervisor._prune(supervisor._history.load())
    assert [path.name[5:13] for path in folder.paths.list_checkpoints()] == ["00000002", "00000003"]
    asked: list[RunPaths] = []

    def apply(paths: RunPaths, **_: object) -> list[KeepVerdict]:
        asked.append(paths)
        return []

    monkeypatch.setattr("holdfast.flows.supervisor.supervise.deletion.apply", apply)
    for _ in range(5):
        supervisor._prune(supervisor._history.load())
    assert not asked, "nothing is new"
    now[0] += PRUNE_S
    supervisor._prune(supervisor._history.load())
    folder.commit(4, 1)
    supervisor._prune(supervisor._history.load())
    assert len(asked) == 2
    assert not looks, "the tombstones are not listed without a mirror"


def test_a_long_ingest_is_followed_by_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "runs", 1)
    calls: list[float] = []

    class SlowIndex(Index):
        """An index that takes a while for each run."""

        def update(self, paths: RunPaths) -> None:
            calls.append(time.monotonic())
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass

    monkeypatch.setattr(supervise, "FREE_S", 0.0)
    monkeypatch.setattr(supervise, "REST", 1e4)
    found = Ingestion(SlowIndex(), folder.paths, failed=LOG.warning, succeeded=lambda: None)
    history = load_history(folder.paths)
    found.ask(history)
    while found._thread is not None:
        time.sleep(0.001)
    folder.commit(2, 1)
    found.ask(load_history(folder.paths))
    assert len(calls) == 1
    found.finish()
    assert len(calls) == 2


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_starting_ranks_of_this_machine_have_the_processors_for_themselves(
    tmp_path: Path, executor: str
) -> None:
    folder = RunFolder(tmp_path, "runs", "e" * 32, {"resources": {"executor": executor}})
    folder.submit(1, 2, time.time())
    updated: list[str] = []

    class SeenIndex(Index):
        def update(self, paths: RunPaths) -> None:
            updated.append(paths.name)

    found = Ingestion(SeenIndex(), folder.paths, failed=LOG.warning, succeeded=lambda: None)
    found.ask(load_history(folder.paths))
    assert (found._thread is None and not updated) is (executor == "local")
    found.finish()
    assert updated, "the last state is ingested at once"
