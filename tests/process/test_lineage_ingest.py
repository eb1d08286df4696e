"""Ingest and reindex on real databases, SQLite and PostgreSQL, from real run folders."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.support.postgres import PostgresServer
from tests.support.runs import RunFolder, build_sample_runs

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, ROOT_ID, RunPaths, list_runs
from holdfast.contracts.disk.roots import ensure_root_id
from holdfast.contracts.errors import NotFoundError
from holdfast.lineage.database import states, tables
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest import disk
from holdfast.lineage.ingest.disk import Survey
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import pages, run_queries, views

Dump = Mapping[str, list[dict[str, Any]]]

PROCESSES: Final = 3
ROUNDS: Final = 12
PROCESS_TIMEOUT_S: Final = 120

# Ingests every run of a root repeatedly, as `show` and the flow do at the same time.
INGEST_PROGRAM: Final = """
import sys
from pathlib import Path
from holdfast.contracts.disk.paths import list_runs
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
url, root, rounds = sys.argv[1:]
print("ready", flush=True)
with open_database(url) as database:
    for _ in range(int(rounds)):
        for paths in list_runs(Path(root)):
            ingest_run(database, paths, fresh=True)
"""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.more)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new database with an up-to-date schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'index.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as address:
        upgrade(address)
        yield address


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with open_database(url) as opened:
        yield opened


def dump(database: Database) -> Dump:
    """Every row of every table, in the order of the keys."""
    every = tables.TABLES
    with database.reading() as connection:
        return {
            table.name: [
                dict(row)
                for row in connection.execute(
                    table.select().order_by(*table.primary_key.columns)
                ).mappings()
            ]
            for table in every
        }


def clear(database: Database) -> None:
    with database.writing() as connection:
        connection.execute(text("DELETE FROM runs"))


def listed(database: Database, run: str) -> list[views.CheckpointView]:
    """The checkpoints of a run, oldest first."""
    return pages.list_checkpoints(database, run, newest_first=False).items


@pytest.mark.more
def test_no_lock_is_held_while_a_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next(build_sample_runs(tmp_path / "runs"))
    place = tmp_path / "index.db"
    real, writes = disk.survey, []

    def slow_survey(paths: RunPaths) -> Survey:
        # Another process writes, as it could while a shared file system is slow.
        with sqlite3.connect(place, timeout=0.2) as other:
            writes.append(other.execute("UPDATE runs SET run = run").rowcount)
        return real(paths)

    with open_database(f"sqlite:///{place}") as opened:
        monkeypatch.setattr(disk, "survey", slow_survey)
        ingest_run(opened, folder.paths)
        assert writes
        assert run_queries.show_run(opened, str(folder.paths.directory))["run"] == "gpt"


def test_folder_is_read_again_if_another_process_wrote_meanwhile(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = build_sample_runs(tmp_path / "runs")
    folder = next(story)
    real, looks = disk.survey, []

    def overtaken(paths: RunPaths) -> Survey:
        seen = real(paths)
        looks.append(seen.fingerprint)
        if len(looks) == 1:
            next(story)
            ingest_run(database, folder.paths)
        return seen

    monkeypatch.setattr(disk, "survey", overtaken)
    ingest_run(database, folder.paths)
    assert len(set(looks)) == 2
    shown = run_queries.show_run(database, str(folder.paths.directory))
    assert len(shown["attempts"]) == 1


@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_reindex_equals_live_ingest(database: Database, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for folder in build_sample_runs(root):
        ingest_run(database, folder.paths)
        # The fork also changes the rows of its origin.
        ingest_run(database, RunPaths(root / "gpt"))
    live = dump(database)
    for paths in list_runs(root):
        ingest_run(database, paths)
    assert dump(database) == live, "a second ingest changed rows"
    clear(database)
    assert not any(dump(database).values()), "deleting runs must delete all rows by foreign keys"
    report = reindex(database, root)
    assert (report.runs, report.failed, report.removed) == (["gpt", "gpt-b"], {}, [])
    rebuilt = dump(database)
    for table, rows in live.items():
        assert rows, f"the sample run leaves {table} empty"
        assert rebuilt[table] == rows, table
    assert dump(database) == live
    reindex(database, root)
    assert dump(database) == live, "a second reindex changed rows"


def test_sample_run_is_summarised_correctly(database: Database, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    *_, fork = build_sample_runs(root)
    reindex(database, root)
    rows = dump(database)
    states = {row["name"]: row["state"] for row in rows["checkpoints"]}
    assert states["step-00000120.a0001.l02"] == "deleted"
    assert "step-00000110.a0001.l02" not in states, "a directory without a manifest has no row"
    shown = run_queries.show_run(database, "gpt")
    assert (shown["state"], shown["step"]) == ("completed", 200)
    causes = [(a["state"], a["cause"], a["last_step"]) for a in shown["attempts"]]
    assert causes == [
        ("preempted", "preemption", 120),
        ("node_failed", "node_failure", 170),
        ("completed", None, 200),
    ]
    assert [a["nodes"] for a in shown["attempts"]] == [["node-a"]] * 3
    assert shown["attempts"][0]["signal_to_commit_s"] == 2.0
    assert [i["last_step"] for i in shown["attempts"][0]["launches"]] == [113, 120]
    # 13 steps lost by the crash, 50 by the lost node and the rollback.
    assert shown["goodput"]["steps_lost"] == 13 + 50
    assert run_queries.show_run(database, "gpt-b")["path"] == str(fork.paths.directory)
    assert {a["command_digest"] for a in shown["attempts"]} == {"d" * 64}


def test_checkpoints_are_listed_oldest_first_with_keep_reasons(
    database: Database, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    for _ in build_sample_runs(root):
        pass
    reindex(database, root)
    found = listed(database, "gpt")
    assert [c["step"] for c in found] == [50, 100, 120, 150, 200]
    reasons = [c["reason"] for c in found]
    assert reasons[0] == "pinned, no keep rule set"
    assert reasons[1] == "in use as the parent of run gpt-b, no keep rule set"
    assert reasons[2] == "deleted: keep.last 2: step 120 is older"
    assert reasons[3].startswith("rolled back")
    assert reasons[4].startswith("newest, exported to /exports/gpt.pt")
    assert [c["pinned"] for c in found] == [True, False, False, False, False]
    assert found[1]["parent"] == found[0]["id"]
    assert all(c["bytes"] and c["checksum"] and c["committed_at"] for c in found)
    assert found[2]["metrics"] == {"loss": 2.5}


def test_ancestry_and_graph_cross_forks_and_deletions(database: Database, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for _ in build_sample_runs(root):
        pass
    reindex(database, root)
    line = run_queries.ancestry(database, "gpt-b:step-00000150.a0001.l01")
    assert [c["id"] for c in line] == [
        "gpt-b:step-00000150.a0001.l01",
        "gpt:step-00000100.a0001.l01",
        "gpt:step-00000050.a0001.l01",
    ]
    last = run_queries.ancestry(database, str(root / "gpt/checkpoints/step-00000200.a0003.l01"))
    assert [c["step"] for c in last] == [200, 120, 100, 50]
    assert [c["path"] for c in last] == [
        c["path"] for c in listed(database, "gpt")[::-1] if not c["rolled_back"]
    ]
    for run in ("gpt", "gpt-b"):
        graph = run_queries.lineage_graph(database, run)
        ids = [node["id"] for node in graph["nodes"]]
        assert len(ids) == len(set(ids))
        ends = {end for edge in graph["edges"] for end in (edge["from"], edge["to"])}
        assert ends <= set(ids), "an edge leads nowhere"
        fork: views.Edge = {
            "from": "gpt-b",
            "to": "gpt:step-00000100.a0001.l01",
            "kind": "forked_from",
        }
        assert graph["edges"].count(fork) == 1, "both runs record the fork; it must appear once"
    nodes = run_queries.lineage_graph(database, "gpt")["nodes"]
    marked = [node["step"] for node in nodes if node.get("rolled_back")]
    assert marked == [150], "a rolled-back checkpoint must stay in the lineage, marked"
    kinds = {edge["kind"] for edge in run_queries.lineage_graph(database, "gpt")["edges"]}
    # tests/frameworks/test_import.py has the edge of an imported run, and
    # tests/api/test_consumers.py that to a consumer.
    elsewhere = {states.EdgeKind.IMPORTED_FROM, states.EdgeKind.CONSUMED_BY}
    assert kinds == {kind.value for kind in states.EdgeKind} - elsewhere


@pytest.mark.more
def test_concurrent_ingests_leave_the_same_rows(url: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    story = build_sample_runs(root)
    next(story)
    command = [sys.executable, "-c", INGEST_PROGRAM, url, str(root), str(ROUNDS)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    try:
        assert all(p.stdout and p.stdout.readline() == b"ready\n" for p in processes)
        for _ in story:
            pass
        said = [p.communicate(timeout=PROCESS_TIMEOUT_S)[1].decode() for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * PROCESSES, said
    with open_database(url) as database:
        for paths in list_runs(root):
            ingest_run(database, paths)
        together = dump(database)
        clear(database)
        reindex(database, root)
        assert dump(database) == together


@pytest.mark.more
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_ingests_of_partial_folders_in_any_order_end_in_the_same_rows(
    database: Database, tmp_path: Path, data: st.DataObject
) -> None:
    root, kept = tmp_path / "runs", tmp_path / "snapshots"
    if not kept.exists():
        for number, _ in enumerate(build_sample_runs(root)):
            shutil.copytree(root, kept / f"{number:02d}")
    snapshots = sorted(kept.iterdir())
    _put(snapshots[-1], root)
    clear(database)
    reindex(database, root)
    wanted = dump(database)
    clear(database)
    some = data.draw(st.lists(st.sampled_from(snapshots), max_size=4))
    cut = data.draw(st.integers(min_value=0, max_value=400))
    for snapshot in [*some, snapshots[-1]]:
        _put(snapshot, root)
        if snapshot is not snapshots[-1]:
            journal = root / "gpt" / "journal" / "flow.jsonl"
            if journal.exists():
                os.truncate(journal, max(0, journal.stat().st_size - cut))
        for paths in list_runs(root) * 2:
            ingest_run(database, paths)
    assert dump(database) == wanted


def _put(snapshot: Path, root: Path) -> None:
    """Replace the runs under `root` by those of a snapshot, keeping the root's id."""
    identity = ensure_root_id(root)
    shutil.rmtree(root)
    shutil.copytree(snapshot, root, ignore=shutil.ignore_patterns(ROOT_ID))
    (root / ROOT_ID).write_text(identity + "\n")


def test_unchanged_folder_is_not_read_again(database: Database, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "quiet", "c" * 32)
    folder.submit(1, 2, 1_700_000_000.0)
    name = folder.commit(10, 1)
    ingest_run(database, folder.paths)
    with database.writing() as connection:
        connection.execute(text("UPDATE checkpoints SET bytes = 0"))
    ingest_run(database, folder.paths)
    rows = dump(database)["checkpoints"]
    assert [(row["name"], row["bytes"]) for row in rows] == [(name, 0)]
    ingest_run(database, folder.paths, fresh=True)
    assert dump(database)["checkpoints"][0]["bytes"] > 0


def test_damage_is_taken_from_manifests_and_resume_events(
    database: Database, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path, "hurt", "e" * 32)
    folder.submit(1, 2, 1_700_000_000.0)
    torn, rotten = folder.commit(10, 1), folder.commit(20, 1)
    (folder.paths.checkpoint(torn) / MANIFEST).write_text('{"format": 1')
    ingest_run(database, folder.paths)
    assert [c["state"] for c in listed(database, "hurt")] == ["damaged", "committed"]
    folder.tell(
        "rank0", EventKind.RESUMED, attempt=1, checkpoint=None, step=0, skipped=[f"{rotten}: gone"]
    )
    ingest_run(database, folder.paths)
    found = listed(database, "hurt")
    assert [c["state"] for c in found] == ["damaged", "damaged"]
    assert found[1]["detail"] == f"{rotten}: gone"
    folder.tell("rank0", EventKind.RESUMED, attempt=1, checkpoint=f"hurt:{rotten}", step=20)
    ingest_run(database, folder.paths)
    assert listed(database, "hurt")[1]["state"] == "committed"


def test_runs_and_checkpoints_gone_from_disk_leave_the_index(
    database: Database, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path, "gone", "f" * 32)
    folder.submit(1, 2, 1_700_000_000.0)
    name = folder.commit(10, 1)
    ingest_run(database, folder.paths)
    shutil.rmtree(folder.paths.checkpoint(name))
    ingest_run(database, folder.paths)
    assert pages.list_checkpoints(database, "gone").items == []
    again = shutil.move(folder.paths.directory, tmp_path / "elsewhere")
    RunFolder(tmp_path, "gone", "9" * 32)
    ingest_run(database, folder.paths)
    assert [run["uid"] for run in pages.list_runs(database).items] == ["9" * 32]
    shutil.rmtree(again)
    shutil.rmtree(folder.paths.directory)
    assert reindex(database, tmp_path).removed == ["gone"]
    assert pages.list_runs(database).items == []
    with pytest.raises(NotFoundError, match=r"no spec\.json"):
        ingest_run(database, folder.paths)


@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_invalid_text_and_numbers_are_stored_safely(database: Database, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "odd", "8" * 32)
    folder.tell("flow", EventKind.NOTE, text="nul \0 half \udc80")
    with open(folder.paths.journal_of("flow"), "a") as journal:
        line = {"writer": "flow", "opening": 9, "sequence": 0, "time": 5e9, "kind": "note"}
        journal.write(json.dumps({**line, "data": {"value": [float("nan"), 10**15]}}) + "\n")
        # Integers of more than 64 bits count as damage; neither databases nor the API have them.
        journal.write(json.dumps({**line, "sequence": 1, "data": {"value": 10**30}}) + "\n")
    ingest_run(database, folder.paths)
    first, second = pages.list_events(database, "odd", newest_first=False).items
    assert first["data"] == {"text": "nul \ufffd half ?"}
    assert second["data"] == {"value": ["nan", 10**15]}


def test_unreadable_run_does_not_stop_reindex(database: Database, tmp_path: Path) -> None:
    RunFolder(tmp_path, "good", "7" * 32)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "spec.json").write_text("not JSON")
    seen: list[str] = []
    report = reindex(database, tmp_path, seen.append)
    assert (report.runs, seen, report.ok) == (["good"], ["bad", "good"], False)
    assert "RunRecord" in report.failed["bad"]
    with pytest.raises(NotFoundError, match="no such folder"):
        reindex(database, tmp_path / "nowhere")


def test_find_run_prefers_the_root_then_the_newest(database: Database, tmp_path: Path) -> None:
    for number, (root, at) in enumerate((("one", 10.0), ("two", 30.0), ("three", 20.0))):
        folder = RunFolder(tmp_path / root, "same", f"{number}" * 32, created_at=at)
        ingest_run(database, folder.paths)
    assert run_queries.find_run(database, "same").root == str(tmp_path / "two")
    assert run_queries.find_run(database, "same", tmp_path / "one").uid == "0" * 32
    assert run_queries.find_run(database, str(tmp_path / "three" / "same")).uid == "2" * 32
    assert run_queries.find_run(database, "1" * 32).paths.directory == tmp_path / "two" / "same"
    assert [run["created_at"][14:19] for run in pages.list_runs(database).items] == [
        "00:30",
        "00:20",
        "00:10",
    ]
    assert len(pages.list_runs(database, limit=1).items) == 1
    assert len(pages.list_runs(database, pages.RunFilter(root=tmp_path / "one")).items) == 1
    with pytest.raises(NotFoundError, match="did you mean same"):
        run_queries.find_run(database, "sane")
    with pytest.raises(NotFoundError, match="expected <run>:step"):
        run_queries.find_checkpoint(database, "same:latest")


def test_goodput_of_a_live_run_follows_its_journal(database: Database, tmp_path: Path) -> None:
    now = time.time()
    folder = RunFolder(tmp_path, "lives", "a" * 32, created_at=now - 100)
    attempt = folder.submit(1, 2, now - 90)
    folder.claim(1, now - 80)
    folder.launch(1, 1, 0, None)
    for saves in (1, 2):
        time.sleep(0.05)
        with JournalWriter(attempt.rank_journal) as journal:
            journal.append(EventKind.STAGED, attempt=1, launch=1, blocked_s=0.02)
        ingest_run(database, folder.paths)
        for until in (now + 1000, now + 2000):
            goodput = run_queries.show_run(database, "lives", now=until)["goodput"]
            assert goodput["blocked_s"] == pytest.approx(0.02 * saves)
            assert goodput["total_s"] == pytest.approx(until - now + 100)
