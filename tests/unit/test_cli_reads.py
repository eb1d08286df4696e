"""Which files a command reads: as few as possible of runs that the user did not ask about."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.cli.main import main
from holdfast.cli.shared.index import locate_run
from holdfast.contracts.disk import reading
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records import documents
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run

RUNS = 12
UIDS = [f"{number:032x}" for number in range(RUNS)]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with `RUNS` runs; the one with the first name is the oldest."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for name in ("HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "home" / "runs"
    for number, uid in enumerate(UIDS):
        add_run(root, f"run-{number:02}", uid, created_at=1_700_000_000.0 + number)
    return root


def add_run(root: Path, name: str, uid: str, *, created_at: float) -> RunPaths:
    folder = RunFolder(root, name, uid, created_at=created_at)
    folder.submit(1, 2, created_at)
    return folder.paths


def edit_spec(paths: RunPaths, **changes: Any) -> None:
    paths.spec.write_text(json.dumps({**json.loads(paths.spec.read_bytes()), **changes}))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file of a run that is opened from now on."""
    real, found = reading.open_beneath, []

    def count(path: Path | str, *arguments: Any, **more: Any) -> int:
        found.append(Path(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(reading, "open_beneath", count)
    return found


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every spec that is parsed from now on, by its run."""
    real, found = documents.RunRecord.model_validate_json, []

    def count(content: bytes, **more: Any) -> documents.RunRecord:
        found.append(json.loads(content)["run"])
        return real(content, **more)

    monkeypatch.setattr(documents.RunRecord, "model_validate_json", count)
    return found


@pytest.fixture
def list_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[dict[str, Any]]]:
    def call(*arguments: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "runs", "--json", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return rows

    return call


def journals_of(opened: list[Path]) -> set[str]:
    """The runs whose journals were opened."""
    found = [path for path in opened if path.suffix == ".jsonl"]
    return {name for path in found for name in path.parts if name.startswith("run-")}


@pytest.mark.more
def test_a_limit_reads_only_the_journals_of_the_newest_runs(
    list_runs: Callable[..., list[dict[str, Any]]], opened: list[Path]
) -> None:
    rows = list_runs("--limit", 3)
    assert [row["run"] for row in rows] == ["run-11", "run-10", "run-09"]
    assert journals_of(opened) == {"run-09", "run-10", "run-11"}
    assert list_runs()[:3] == rows


@pytest.mark.more
def test_a_limit_skips_unreadable_runs(
    root: Path, list_runs: Callable[..., list[dict[str, Any]]], opened: list[Path]
) -> None:
    (root / "run-05" / "spec.json").write_text("{")
    edit_spec(RunPaths(root / "run-10"), run="another")
    rows = list_runs("--limit", 3)
    assert [row["run"] for row in rows] == ["run-11", "run-09", "run-08"]
    assert journals_of(opened) == {"run-08", "run-09", "run-11"}
    every = list_runs("--limit", RUNS)
    assert [row["run"] for row in every[-2:]] == ["run-05", "run-10"]
    assert {row["state"] for row in every[-2:]} == {"unreadable"}
    assert all(row["reason"] for row in every[-2:])
    assert list_runs() == every


@pytest.mark.parametrize("name", ["run-11", "run"])
def test_finding_a_run_by_name_parses_no_spec(root: Path, name: str, parsed: list[str]) -> None:
    add_run(root, "run", "u", created_at=1.0)
    parsed.clear()
    assert locate_run(name, None).name == name
    assert parsed == []


def test_a_name_wins_over_another_runs_equal_uid(root: Path) -> None:
    edit_spec(RunPaths(root / "run-00"), uid="run-11")
    assert locate_run("run-11", None) == RunPaths(root / "run-11")


def test_finding_a_run_by_uid_parses_one_spec(root: Path, parsed: list[str]) -> None:
    """This also holds while the run is not in the index."""
    assert locate_run(UIDS[7], None).name == "run-07"
    assert set(parsed) == {"run-07"}
    with pytest.raises(NotFoundError):
        locate_run("f" * 32, None)
    assert set(parsed) == {"run-07"}


def test_finding_an_indexed_uid_opens_one_spec(root: Path, opened: list[Path]) -> None:
    with open_database() as database:
        ingest_run(database, RunPaths(root / "run-07"))
        opened.clear()
        assert locate_run(UIDS[7], None, database) == RunPaths(root / "run-07")
        assert set(opened) == {root / "run-07" / "spec.json"}
        # The folder was moved: the disk takes precedence over the index.
        (root / "run-07").rename(root / "moved")
        edit_spec(RunPaths(root / "moved"), run="moved")
        assert locate_run(UIDS[7], None, database) == RunPaths(root / "moved")


def test_a_uid_wins_over_a_folder_with_that_name(root: Path) -> None:
    add_run(root, UIDS[7], "f" * 32, created_at=1.0)
    assert locate_run(UIDS[7], None) == RunPaths(root / "run-07")


def test_the_older_spec_wins_when_two_folders_share_a_uid(root: Path) -> None:
    add_run(root, "copy", UIDS[7], created_at=1.0)
    assert locate_run(UIDS[7], None) == RunPaths(root / "run-07")
