"""The index as a flow uses it: a deleted or damaged index is rebuilt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.runs import RunFolder, build_sample_runs

from holdfast.contracts.errors import LineageError
from holdfast.lineage.database.heal import MAGIC, quarantine
from holdfast.lineage.database.sqlite_file import URL_VARIABLE
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.index import Index
from holdfast.lineage.queries import run_queries


def test_an_index_deleted_while_open_is_rebuilt(
    testbed: tuple[RunFolder, Path],
) -> None:
    run, path = testbed
    with Index() as index:
        index.update(run.paths)
        for name in path.parent.glob("index.db*"):
            name.unlink()
        index.update(run.paths)
    with open_database(f"sqlite:///{path}") as database:
        shown = run_queries.show_run(database, str(run.paths.directory), now=0.0)
    assert shown["run"]


def test_an_index_damaged_while_open_is_quarantined_and_rebuilt(
    testbed: tuple[RunFolder, Path],
) -> None:
    run, path = testbed
    with Index() as index, Index() as other:
        index.update(run.paths)
        other.update(run.paths)
        damage(path)
        # Drop the connections, which still have the undamaged pages in memory.
        index.open().engine.dispose()
        with pytest.warns(UserWarning, match="the index was damaged. It was moved to"):
            index.update(run.paths)
        other.update(run.paths)
        assert (index.files, other.files) == (2, 2)
        for one in (index, other):
            assert run_queries.show_run(one.open(), str(run.paths.directory), now=0.0)["run"]
    assert path.with_name("index.db.damaged").is_file()
    assert quarantine(path) is None, "the rebuilt index is sound and is kept"


@pytest.mark.more
def test_many_processes_rebuild_a_damaged_index_once(testbed: tuple[RunFolder, Path]) -> None:
    run, path = testbed
    path.write_bytes(MAGIC + b"and then nothing that fits" * 4096)
    words = f"from pathlib import Path; from holdfast.lineage.index import Index; \
from holdfast.contracts.disk.paths import RunPaths; \
Index().update(RunPaths(Path({str(run.paths.directory)!r})))"
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", words]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, ended
    with Index() as index:
        assert run_queries.show_run(index.open(), str(run.paths.directory), now=0.0)["run"]
    assert quarantine(path) is None


def test_a_damaged_index_that_cannot_be_moved_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LineageError, match="the index is damaged and cannot be moved away"):
        quarantine(tmp_path / "gone" / "index.db")


@pytest.fixture
def testbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, Path]:
    """A run with a full history, and the path of its index."""
    (tmp_path / "runs").mkdir()
    run = next(run for run in list(build_sample_runs(tmp_path / "runs")) if run.name == "gpt")
    path = tmp_path / "index.db"
    monkeypatch.setenv(URL_VARIABLE, f"sqlite:///{path}")
    return run, path


def damage(path: Path) -> None:
    """Write over all but the first page of the file, and over its log."""
    for name, start in ((path, 4096), (Path(f"{path}-wal"), 0)):
        with open(name, "r+b") as stream:
            stream.seek(start)
            stream.write(b"\xa5" * max(0, name.stat().st_size - start))
