"""Pages of the index on real databases: complete, ordered, stable while rows are added."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.postgres import PostgresServer
from tests.support.runs import T0, RunFolder, build_sample_runs

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError, QueryError
from holdfast.contracts.records.annotations import annotate
from holdfast.contracts.states import RunState
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.states import CheckpointState
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import forget_run, ingest_run
from holdfast.lineage.queries import pages, run_queries, views
from holdfast.lineage.queries.comparison import compare, list_files
from holdfast.lineage.queries.cursors import PAGE_MAX, RowPage
from holdfast.lineage.queries.totals import list_nodes, metric_series, node_faults


# The tests of the API read pages from SQLite.
@pytest.fixture(
    scope="module", params=[pytest.param("sqlite", marks=pytest.mark.more), "postgresql"]
)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """An index of the sample run, its fork, and three runs that just started, for all tests."""
    folder = tmp_path_factory.mktemp("pages")
    root = folder / "runs"
    for _ in build_sample_runs(root):
        pass
    for number, uid in enumerate("cde"):
        fields = {"tags": [f"run-{uid}", *(["llm"] if uid != "e" else [])]}
        at = T0 + 1000 + number // 2
        RunFolder(root, f"later-{uid}", uid * 32, fields, created_at=at)
    given: dict[str, Any] = {"add": ["noted"], "note": "last 𝄞", "by": "ann", "via": "cli"}
    annotate(RunPaths(root / "later-e"), **given)
    annotate(RunPaths(root / "gpt"), "step-00000200.a0003.l01", **given)
    with contextlib.ExitStack() as stack:
        address = f"sqlite:///{folder / 'index.db'}"
        if request.param == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgres")
            address = stack.enter_context(server.database())
            upgrade(address)
        opened = stack.enter_context(open_database(address))
        reindex(opened, root)
        yield opened


@pytest.fixture
def root(database: Database) -> Path:
    """The root of the indexed runs."""
    return Path(pages.list_runs(database).items[0]["root"])


def walk(ask: Callable[[str | None], RowPage[Any]], pages_max: int = 100) -> list[Any]:
    """All items of all pages."""
    items, after = [], None
    for _ in range(pages_max):
        page = ask(after)
        items += page.items
        after = page.next
        if after is None:
            return items
    raise AssertionError("the pages have no end")


def names(rows: list[Any]) -> list[str]:
    return [row["run"] for row in rows]


def test_pages_together_are_the_whole_list(database: Database) -> None:
    """Every list read with one row per page equals the list on one page, also for equal keys."""
    for sort in pages.RUN_ORDERS:
        runs = functools.partial(pages.list_runs, database, sort=sort)
        assert runs().next is None
        single = walk(lambda after, ask=runs: ask(after=after, limit=1))  # type: ignore[misc]
        assert single == runs().items
        assert len(single) == 5
        assert runs(limit=None) == runs()
    assert names(pages.list_runs(database).items)[:3] == ["later-e", "later-d", "later-c"]
    assert names(pages.list_runs(database, sort="name").items)[0] == "gpt"
    for newest_first in (False, True):
        for listing in (pages.list_checkpoints, pages.list_events):
            ask: Any = functools.partial(listing, database, "gpt", newest_first=newest_first)
            single = walk(lambda after, ask=ask: ask(after=after, limit=1))  # type: ignore[misc]
            assert single == ask().items
            assert len(single) > 2
    assert walk(lambda after: pages.list_storage(database, after=after, limit=2)) == (
        pages.list_storage(database).items
    )


def test_run_filters(database: Database, root: Path) -> None:
    def runs(**where: Any) -> list[str]:
        return sorted(names(pages.list_runs(database, pages.RunFilter(**where)).items))

    assert runs(states=(RunState.COMPLETED,)) == ["gpt"]
    assert runs(search="GPT") == ["gpt", "gpt-b"]
    assert runs(search="%") == [], "the search text must not be a pattern"
    assert runs(search="c" * 32) == ["later-c"]
    assert runs(created_from=T0 + 1, created_to=T0 + 900) == ["gpt-b"]
    assert runs(root=root / "elsewhere") == []
    assert runs(tags=("llm",)) == ["later-c", "later-d"]
    assert runs(tags=("llm", "run-d")) == ["later-d"]
    assert runs(tags=("LLM",)) == runs(tags=("run",)) == runs(tags=("llm", "run")) == []
    assert pages.filter_values(database)["tags"] == ["llm", "noted", "run-c", "run-d", "run-e"]
    assert names(pages.list_runs(database, pages.RunFilter(tags=("noted",)), sort="cost").items)
    assert len(runs(root=root)) == 5

    def steps(**where: Any) -> list[int]:
        found = pages.list_checkpoints(database, "gpt", pages.CheckpointFilter(**where))
        return [one["step"] for one in found.items]

    assert steps() == [200, 150, 120, 100, 50]
    assert steps(states=(CheckpointState.DELETED,)) == [120]
    assert steps(pinned=True) == [50]
    assert steps(step_from=100, step_to=150) == [150, 120, 100]
    wanted = pages.EventFilter(kinds=("committed",), attempt=1)
    events = pages.list_events(database, "gpt", wanted).items
    assert [event["data"]["step"] for event in events] == [120, 100, 50]


def test_tags_and_notes_are_shown(database: Database) -> None:
    shown = run_queries.show_run(database, "later-e")
    assert (shown["tags"], shown["note"], shown["note_by"]) == (
        ["noted", "run-e"],
        "last 𝄞",
        "ann",
    )
    assert shown["note_at"]
    newest = pages.list_checkpoints(database, "gpt").items[0]
    assert (newest["tags"], newest["note"], newest["note_by"]) == (["noted"], "last 𝄞", "ann")
    assert pages.list_checkpoints(database, "gpt").items[1]["tags"] == []


def test_cursor_stays_valid_while_runs_are_added(database: Database, tmp_path: Path) -> None:
    first = pages.list_runs(database, limit=2)
    newer = RunFolder(tmp_path, "newer", "f" * 32, created_at=T0 + 5000)
    older = RunFolder(tmp_path, "older", "9" * 32, created_at=T0 - 5000)
    for folder in (newer, older):
        ingest_run(database, folder.paths)
    rest = walk(lambda after: pages.list_runs(database, after=after or first.next, limit=2))
    for folder in (newer, older):
        forget_run(database, folder.uid)
    assert names(first.items) + names(rest) == [
        *("later-e", "later-d", "later-c", "gpt-b", "gpt", "older")
    ]


def test_a_page_equals_the_rows_of_the_whole_list_in_every_order(database: Database) -> None:
    for sort in pages.RUN_ORDERS:
        whole = pages.list_runs(database, sort=sort, limit=None).items
        parts = walk(functools.partial(_listed, database, sort))
        assert parts == whole, sort
        assert all(set(one) == set(views.RunRow.__annotations__) for one in parts)


def _listed(database: Database, sort: pages.RunSort, after: str | None) -> RowPage[Any]:
    return pages.list_runs(database, sort=sort, after=after, limit=2)


def test_newest_lines_are_those_of_the_lists_of_each_group(database: Database) -> None:
    groups = [("committed", "staged"), ("launch_started", "launch_ended"), ("no_such_kind",)]
    for most in (1, 3, 100):
        found = pages.newest_lines(database, "a" * 32, groups, most)
        for lines, kinds in zip(found, groups, strict=True):
            where = pages.EventFilter(kinds=kinds)
            listed = pages.list_events(database, "gpt", where, limit=most).items
            told = [(one["journal"], one["opening"], one["sequence"]) for one in listed]
            assert [(one["journal"], one["opening"], one["sequence"]) for one in lines][
                ::-1
            ] == told
    assert found[0]
    assert found[1]
    assert not found[2]


def test_keep_reasons_of_a_page_equal_those_of_the_whole_list(database: Database) -> None:
    by_one = walk(lambda after: pages.list_checkpoints(database, "gpt", after=after, limit=1))
    reasons = {one["step"]: one["reason"] for one in by_one}
    assert reasons[200].startswith("newest, exported to /exports/gpt.pt")
    assert reasons[100] == "in use as the parent of run gpt-b, no keep rule set"
    assert reasons[120] == "deleted: keep.last 2: step 120 is older"


def test_storage_reports_what_a_prune_would_delete(database: Database, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "kept", "8" * 32, {"checkpoint": {"keep": {"last": 1}}})
    folder.submit(1, 2, T0)
    old, _ = folder.commit(10, 1), folder.commit(20, 1)
    ingest_run(database, folder.paths)
    rows = {row["run"]: row for row in pages.list_storage(database).items}
    forget_run(database, folder.uid)
    assert rows["kept"]["would_prune"] == [f"kept:{old}"]
    assert rows["kept"]["would_prune_bytes"] * 2 == rows["kept"]["kept_bytes"] > 0
    assert (rows["gpt"]["kept"], rows["gpt"]["deleted"], rows["gpt"]["would_prune"]) == (4, 1, [])


BAD_CURSORS = ("", "!", "é", "bnVsbA", "W10", "A" * 5000, "WyJuYW1lIiwxLDJd")


def test_invalid_cursors_limits_and_names_are_refused(database: Database) -> None:
    for after in BAD_CURSORS:
        with pytest.raises(QueryError, match="not a cursor"):
            pages.list_runs(database, after=after)
    for limit in (0, -1, PAGE_MAX + 1):
        with pytest.raises(QueryError, match=f"expected 1 to {PAGE_MAX}"):
            pages.list_runs(database, limit=limit)
    by_name = pages.list_runs(database, sort="name", limit=1).next
    with pytest.raises(QueryError, match="sorted by created"):
        pages.list_runs(database, after=by_name)
    with pytest.raises(NotFoundError, match="no such run"):
        pages.list_events(database, "nobody")


def test_nodes_metrics_and_comparison_are_returned(database: Database) -> None:
    (node,) = list_nodes(database).items
    assert (node["host"], node["attempts"], node["failures"]) == ("node-a", 4, 1)
    assert node["faults"] == {"node_failure": 1}
    (fault,) = node_faults(database, "node-a")
    assert (fault["run"], fault["attempt"]) == ("gpt", 2)
    curves = metric_series(database, "gpt", names=["loss"])
    assert [(one["attempt"], one["launch"]) for one in curves] == [(1, 1), (1, 2)]
    first = curves[0]["points"]
    assert [point["step"] for point in first] == list(range(1, 114))
    assert first[0]["values"]["loss"] == {"last": 2.0, "low": 2.0, "high": 2.0}
    assert first[5]["steps_per_s"] == 1.0
    few = metric_series(database, "gpt", points=10)[0]["points"]
    assert len(few) <= 10
    assert few[0]["values"]["loss"]["high"] == 2.0, "merged points must keep the extremes"
    rows = {row["run"]: row for row in pages.list_runs(database).items}
    assert len(rows["gpt"]["spark"]) == 20
    assert rows["gpt"]["goodput"]["steps_lost"] == 13 + 50
    said = compare(database, "gpt:step-00000200.a0003.l01", "gpt-b:step-00000150.a0001.l01")
    assert said["common_ancestor"] == "gpt:step-00000100.a0001.l01"
    facts = {fact["name"]: fact["is_same"] for fact in said["facts"]}
    assert (facts["command_digest"], facts["step"], facts["code_commit"]) == (True, False, None)
    assert "cost.gpu_hour" in {fact["name"] for fact in said["config"]}
    (file,) = list_files(database, "gpt:step-00000200.a0003.l01")
    assert (file["path"], file["bytes"]) == ("__0_0.distcp", 17)
    with pytest.raises(NotFoundError, match="no such committed checkpoint"):
        compare(database, said["one"], "gpt:step-00000201.a0003.l01")


def test_consistent_read_sees_a_single_snapshot(database: Database, root: Path) -> None:
    """A run that is added meanwhile is visible to others at once, but not in the same read."""
    new = RunFolder(root, "meanwhile", "f" * 32, created_at=T0)
    try:
        with ThreadPoolExecutor(1) as pool, database.consistent_read():
            before = names(pages.list_runs(database).items)
            pool.submit(ingest_run, database, new.paths).result(60)
            with database.consistent_read():
                assert names(pages.list_runs(database).items) == before
            assert names(pages.list_runs(database).items) == before
            others = pool.submit(pages.list_runs, database).result(60)
        assert set(names(others.items)) == {*before, "meanwhile"}
        assert names(pages.list_runs(database).items) == names(others.items)
    finally:
        forget_run(database, "f" * 32)
        shutil.rmtree(new.paths.directory)


def test_failed_read_leaves_no_open_transaction(database: Database) -> None:
    with pytest.raises(NotFoundError), database.consistent_read():
        compare(database, "nobody:step-00000001.a0001.l01", "nobody:step-00000002.a0001.l01")
    assert database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert pages.list_runs(database).items
