"""File permissions: the umask decides in a run; other files are readable only by the owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.durable import create_bytes, write_bytes
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.paths import ROOT_ID
from holdfast.contracts.disk.roots import ensure_root_id
from holdfast.lineage.database.transactions import open_database


@pytest.fixture
def umask() -> Iterator[int]:
    """The umask of this process; restored after the test."""
    before = os.umask(0o022)
    yield before
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("mask", "expected", "of_locks"),
    [(0o022, 0o644, 0o600), (0o077, 0o600, 0o600), (0o007, 0o660, 0o660)],
)
@pytest.mark.usefixtures("umask")
def test_the_umask_decides_who_can_read_a_run(
    tmp_path: Path, mask: int, expected: int, of_locks: int
) -> None:
    """It decides who may write to the folders, and only those users can open the locks."""
    os.umask(mask)
    run = RunFolder(tmp_path, "run", "a" * 32)
    run.submit(1, 1, 1.7e9)
    run.tell("cli", EventKind.NOTE, text="x")
    checkpoint = run.paths.checkpoint(run.commit(10, 1))
    create_bytes(run.paths.directory / "created", b"x")
    with reading(checkpoint):
        leases = list(run.paths.checkpoints.glob("*.reading-*"))
    files = [path for path in run.paths.directory.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert leases
    locks = [path for path in files if path.suffix == ".lock"]
    assert {mode_of(path) for path in locks} == {of_locks}
    assert {p.name for p in files if mode_of(p) != expected and p not in locks} == set()


@pytest.mark.usefixtures("umask")
def test_the_id_of_a_root_is_for_all_who_can_enter_it(tmp_path: Path) -> None:
    """Clusters that share an index would not be told apart otherwise."""
    os.umask(0o077)
    given = ensure_root_id(tmp_path)
    assert mode_of(tmp_path / ROOT_ID) == 0o644
    # One that an older version left private is opened by its owner.
    (tmp_path / ROOT_ID).chmod(0o600)
    assert ensure_root_id(tmp_path) == given
    assert mode_of(tmp_path / ROOT_ID) == 0o644


@pytest.mark.usefixtures("umask")
def test_a_private_file_is_private_with_any_umask(tmp_path: Path) -> None:
    os.umask(0)
    write_bytes(tmp_path / "token", b"x", mode=0o600)
    assert mode_of(tmp_path / "token") == 0o600


@pytest.mark.usefixtures("umask")
def test_only_the_owner_can_read_the_index(tmp_path: Path) -> None:
    os.umask(0)
    with open_database(f"sqlite:///{tmp_path}/index.db"):
        found = {path.name: mode_of(path) for path in tmp_path.glob("index.db*")}
    assert found
    assert set(found.values()) == {0o600}
