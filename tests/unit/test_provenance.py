"""The digests that a submission records: each changes only with its own subject."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.contracts.records.documents import Provenance
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs.provenance import take_provenance
from holdfast.workers.runs.run_folders import create_run

DIGESTS = frozenset(Provenance.model_fields)


def spec(**fields: object) -> RunSpec:
    return RunSpec.model_validate({"name": "r", "command": ("train.py",), **fields})


def git(folder: Path, *arguments: str) -> str:
    person = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", *person, "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A git folder with one commit and no changes."""
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def changed(one: Provenance, other: Provenance) -> set[str]:
    return {name for name in DIGESTS if getattr(one, name) != getattr(other, name)}


def test_a_clean_git_folder_is_recorded_as_its_commit(code: Path) -> None:
    found = take_provenance(spec(), code)
    assert found.code_commit == git(code, "rev-parse", "HEAD")
    assert found.code_digest is None
    assert found.data_digest is None, "a data digest without data in the config"


CHANGES: list[tuple[Callable[[Path], object], set[str]]] = [
    (lambda code: (code / "train.py").write_text("print(2)\n"), {"code_digest"}),
    (lambda code: (code / "new.py").write_text("print(3)\n"), {"code_digest"}),
    (lambda code: (code / "train.py").unlink(), {"code_digest"}),
    (lambda code: (code / "out.log").write_text("ignored"), set()),
    (lambda code: git(code, "commit", "--allow-empty", "-m", "second"), {"code_commit"}),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_a_code_change_changes_the_code_digest_or_commit(
    code: Path, change: Callable[[Path], object], expected: set[str]
) -> None:
    before = take_provenance(spec(), code)
    change(code)
    after = take_provenance(spec(), code)
    assert changed(before, after) == expected
    assert take_provenance(spec(), code) == after, "the digests of an unchanged folder differ"


def test_a_spec_change_changes_only_its_own_digest(code: Path) -> None:
    plain = take_provenance(spec(), code)
    assert changed(plain, take_provenance(spec(config={"lr": 1}), code)) == {"config_digest"}
    assert changed(plain, take_provenance(spec(environment={"A": "1"}), code)) == {
        "environment_digest"
    }
    corpus = code / "corpus.log"
    corpus.write_text("to be")
    with_data = spec(config={"data": {"train": "corpus.log", "weights": [1, 2]}})
    first = take_provenance(with_data, code)
    corpus.write_text("or not to be")
    assert changed(first, take_provenance(with_data, code)) == {"data_digest"}


def test_a_folder_without_git_is_recorded_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "__pycache__").mkdir()
    first = take_provenance(spec(), tmp_path)
    assert first.code_commit is None
    (tmp_path / "__pycache__" / "train.pyc").write_text("compiled")
    assert take_provenance(spec(), tmp_path) == first
    (tmp_path / "train.py").write_text("print(2)\n")
    assert changed(first, take_provenance(spec(), tmp_path)) == {"code_digest"}
    nowhere = take_provenance(spec(), tmp_path / "nowhere")
    assert (nowhere.code_commit, nowhere.code_digest) == (None, None)


@pytest.mark.parametrize("has_git", [False, True])
def test_digests_do_not_release_the_locks_of_an_open_database(
    tmp_path: Path, has_git: bool
) -> None:
    """Another process still cannot write to the database; see `workers/runs/provenance.py`."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    if has_git:
        git(folder, "init", "--quiet")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", "first")
    path = folder / "index.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for words in ("PRAGMA journal_mode=WAL", "CREATE TABLE t (a)", "BEGIN IMMEDIATE"):
            connection.execute(words)
        take_provenance(spec(), folder)
        snapshot = {"code": "snapshot", "working_directory": str(folder)}
        create_run(spec(launch=snapshot), tmp_path / "runs", created_by="test")
        assert "locked" in write_elsewhere(path)
        connection.execute("COMMIT")
    assert write_elsewhere(path) == ""


def write_elsewhere(path: Path) -> str:
    """The error of another process that writes to the database at the same time, or ""."""
    words = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr
