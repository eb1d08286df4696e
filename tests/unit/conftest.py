"""Fixtures for the `holdfast` command with a new home."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from tests.support.cli_calls import Call, CliResult

from holdfast.cli.main import main
from holdfast.lineage.database.transactions import open_database


@pytest.fixture(scope="session")
def empty_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index without runs. Its migrations take 50 ms, and most tests need only their result."""
    path = tmp_path_factory.mktemp("index") / "holdfast.db"
    open_database(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_index: Path) -> Path:
    """A new Holdfast home with an empty index, without a Prefect API."""
    (tmp_path / "home").mkdir()
    shutil.copy(empty_index, tmp_path / "home")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in ("HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def call(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command in this process."""

    def run(*arguments: object) -> CliResult:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return CliResult(ended.value.code, said.out, said.err)

    return run


@pytest.fixture
def root(home: Path) -> Path:
    return home / "home" / "runs"
