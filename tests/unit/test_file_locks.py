"""Lock files: users who may not write to the folder of a lock can neither open nor hold it."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.other_users import STRANGER, as_user, held_by
from tests.support.runs import RunFolder

from holdfast.contracts.disk.file_locks import locked, open_lock, wait_for_lock
from holdfast.contracts.disk.journal import EventKind, JournalWriter, journal_lock
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.records.supervision import is_supervised, lost_supervisor
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.lineage.database import heal

ALICE, BOB, GROUP = 4301, 4302, 4310
KINDS = pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
SOURCES = Path(__file__).parents[2]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-locks-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        before = os.umask(0o022)
        yield folder
        os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def take(path: Path, *, owner_only: bool = False) -> bool:
    with locked(path, 0.0, owner_only=owner_only) as is_locked:
        return is_locked


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize(
    ("folder", "shared", "private"),
    [(0o755, 0o600, 0o600), (0o2775, 0o660, 0o600), (0o775, 0o660, 0o600), (0o777, 0o666, 0o600)],
)
def test_a_lock_file_has_the_permissions_to_write_of_its_folder(
    place: Path, umask: int, folder: int, shared: int, private: int
) -> None:
    place.chmod(folder)
    os.umask(umask)
    os.close(open_lock(place / "shared"))
    os.close(open_lock(place / "private", owner_only=True))
    assert mode_of(place / "shared") == shared
    assert mode_of(place / "private") == private


def test_an_own_lock_file_gets_the_permissions_of_today(place: Path) -> None:
    (place / "lock").touch(mode=0o644)
    os.close(open_lock(place / "lock"))
    assert mode_of(place / "lock") == 0o600
    place.chmod(0o775)
    os.close(open_lock(place / "lock"))
    assert mode_of(place / "lock") == 0o660


@pytest.mark.root
@KINDS
def test_a_reader_of_a_folder_cannot_hold_its_locks(place: Path, kind: int) -> None:
    paths = [place / name for name in ("orders.lock", "flow.lock", "cli.jsonl")]
    os.close(open_lock(paths[0]))
    with FlowLock(paths[1]):
        pass
    with JournalWriter(paths[2]) as journal:
        journal.append(EventKind.NOTE, text="x")
    paths.append(journal_lock(paths[2]))
    with held_by(STRANGER, paths, kind) as held:
        assert held == [paths[2]]
        assert take(paths[0])
        assert take(paths[1], owner_only=True)
        with JournalWriter(paths[2]) as journal:
            assert journal.append(EventKind.NOTE, text="y").sequence == 0


@pytest.mark.root
def test_a_group_that_may_write_shares_the_locks(place: Path) -> None:
    os.chown(place, ALICE, GROUP)
    place.chmod(0o2775)
    path = place / "orders.lock"
    assert as_user(BOB, lambda: take(path), (GROUP,)) == "True"
    assert as_user(ALICE, lambda: take(path), (GROUP,)) == "True"
    assert path.stat().st_gid == GROUP
    assert "only that user can lock it" in as_user(STRANGER, lambda: take(path))


@pytest.mark.root
def test_a_group_without_the_group_bit_of_the_folder_shares_the_locks(place: Path) -> None:
    """Without setgid, a new file has the writer's own group, whose members must not lock it."""
    os.chown(place, ALICE, GROUP)
    place.chmod(0o775)
    path = place / "orders.lock"
    assert as_user(BOB, lambda: take(path), (GROUP,)) == "True"
    assert path.stat().st_gid == GROUP
    assert mode_of(path) == 0o660
    assert as_user(ALICE, lambda: take(path), (GROUP,)) == "True"


@pytest.mark.root
def test_a_lock_that_root_makes_belongs_to_the_owner_of_the_folder(place: Path) -> None:
    os.chown(place, ALICE, ALICE)
    assert take(place / "lock")
    assert (place / "lock").stat().st_uid == ALICE
    assert as_user(ALICE, lambda: take(place / "lock")) == "True"


@pytest.mark.root
def test_a_planted_lock_does_not_count(place: Path) -> None:
    place.chmod(0o777)
    path = place / "flow.lock"
    as_user(STRANGER, lambda: path.touch(mode=0o666))
    with pytest.raises(ForeignFileError, match=f"belongs to user {STRANGER}.*delete it"):
        open_lock(path, owner_only=True)
    with held_by(STRANGER, [path]) as held:
        assert held == [path]
        assert is_supervised(path) is False


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: p.symlink_to("elsewhere")])
def test_what_is_no_regular_file_is_no_lock(place: Path, make: object) -> None:
    assert callable(make)
    make(place / "lock")
    with pytest.raises(ForeignFileError, match="lock: not a regular file"):
        open_lock(place / "lock")


@pytest.mark.root
def test_a_second_name_of_a_file_does_not_change_its_permissions(place: Path) -> None:
    """A hostile folder could contain the name of a file elsewhere."""
    (place / "shown").write_text("x")
    os.link(place / "shown", place / "lock")
    os.close(open_lock(place / "lock"))
    assert mode_of(place / "shown") == 0o644
    os.chown(place, ALICE, ALICE)
    os.close(open_lock(place / "lock"))
    assert (place / "shown").stat().st_uid == 0


def test_a_link_under_the_folder_is_not_followed(place: Path) -> None:
    (place / "run").mkdir()
    (place / "victim").mkdir()
    (place / "run" / "mirror").symlink_to(place / "victim")
    with pytest.raises(ForeignFileError, match="a link"):
        open_lock(place / "run" / "mirror" / "lock", below=place / "run")
    assert list((place / "victim").iterdir()) == []


@pytest.mark.root
def test_a_folder_without_permission_to_write_is_named(place: Path) -> None:
    said = as_user(STRANGER, lambda: take(place / "lock"))
    assert said.startswith("PermissionError")
    assert str(place / "lock") in said


@pytest.mark.root
def test_only_the_owner_knows_whether_a_run_is_supervised(place: Path) -> None:
    path = place / "flow.lock"
    assert is_supervised(path) is False
    with FlowLock(path) as lock:
        assert is_supervised(path) is False
        assert lost_supervisor(path)
        assert lock.try_take()
        assert is_supervised(path) is True
        assert as_user(STRANGER, lambda: is_supervised(path)) == "None"
        assert as_user(STRANGER, lambda: lost_supervisor(path)) == "False"


@pytest.mark.root
@KINDS
def test_a_lock_file_that_others_can_read_does_not_count(place: Path, kind: int) -> None:
    path = place / "flow.lock"
    path.touch(mode=0o644)
    with held_by(STRANGER, [path], kind) as held:
        assert held == [path]
        assert is_supervised(path) is False


@pytest.mark.root
def test_the_lock_of_an_index_is_not_its_folder(place: Path) -> None:
    """Everyone who can read the folder can lock it."""
    with held_by(STRANGER, [place]) as held, heal._locked(place):
        assert held == [place]
    assert mode_of(place / heal.LOCK) == 0o600


def test_locks_of_runs_are_created_by_one_function() -> None:
    """A lock that another function opens may be one that anybody can hold."""
    calls = {}
    for folder in ("src/holdfast", "flows", "workers", "trainer"):
        for path in sorted((SOURCES / folder).rglob("*.py")):
            content = path.read_text()
            if path.name != "file_locks.py" and re.search(r"\bflock\(|\blockf\(", content):
                calls[path.relative_to(SOURCES).as_posix()] = True
    # The probe of a root locks its own files to learn whether locks work.
    assert set(calls) == {"workers/holdfast/workers/nodes/root_probe.py"}


def test_a_journal_in_a_run_has_one_lock_beside_it(place: Path) -> None:
    run = RunFolder(place, "run", "a" * 32)
    run.tell("cli", EventKind.NOTE, text="x")
    path = run.paths.journal_of("cli")
    assert mode_of(path) == 0o644
    assert mode_of(journal_lock(path)) == 0o600
    assert path in run.paths.list_journals()
    assert journal_lock(path) not in run.paths.list_journals()
    with open(journal_lock(path), "rb") as handle:
        assert wait_for_lock(handle.fileno())
