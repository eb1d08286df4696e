"""What a root's file system must be able to do, on a real folder with one call replaced."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk import durable, reading
from holdfast.workers.nodes import root_probe
from holdfast.workers.nodes.root_probe import (
    RACES,
    SharedProbe,
    check_folder,
    compare,
    find_problems,
    judge_races,
    race,
)


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def ignore(*_: Any, **__: Any) -> None:
    """Report success without doing anything."""


def link_over(real: Callable[..., None]) -> Callable[..., None]:
    def link(first: Path, second: Path) -> None:
        Path(second).unlink(missing_ok=True)
        real(first, second)

    return link


def open_for_all(real: Callable[..., int]) -> Callable[..., int]:
    def open_file(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        handle = real(path, flags, mode, **more)
        if flags & os.O_CREAT:
            os.fchmod(handle, 0o755)
        return handle

    return open_file


def mkdir_again(real: Callable[..., None]) -> Callable[..., None]:
    return lambda path, *more, **given: real(path, *more, **{**given, "exist_ok": True})


def short_names(real: Callable[..., None]) -> Callable[..., None]:
    def touch(path: Path, *more: Any, **given: Any) -> None:
        if len(path.name) > 143:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        real(path, *more, **given)

    return touch


def test_a_local_folder_can_do_all_that_a_root_must(tmp_path: Path) -> None:
    assert find_problems(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "other", "lacks"),
    [
        (os, "link", lambda real: refuse, "hard links"),
        (os, "link", link_over, "hard links"),
        (Path, "mkdir", mkdir_again, "exclusive folders"),
        (os, "replace", lambda real: refuse, "renames"),
        (Path, "rename", lambda real: refuse, "renames"),
        (durable, "fsync_directory", lambda real: refuse, "sync of folders"),
        (os, "pwrite", lambda real: ignore, "appends"),
        (fcntl, "flock", lambda real: refuse, "locks"),
        (fcntl, "flock", lambda real: ignore, "locks"),
        (Path, "touch", short_names, "long names"),
        (os, "open", open_for_all, "private files"),
        (reading, "is_mine", lambda real: lambda path: False, "private files"),
    ],
)
def test_each_lack_is_found_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    other: Callable[[Any], Any],
    lacks: str,
) -> None:
    monkeypatch.setattr(module, name, other(getattr(module, name)))
    found = find_problems(tmp_path)
    monkeypatch.undo()
    assert [one.lacks for one in found] == [lacks]
    assert found[0].text.startswith("the file system ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named_with_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_probe, "PAUSE_S", 0.0)
    (problem,) = check_folder(tmp_path / "absent")
    assert problem.lacks == "writing"
    assert problem.text.startswith(f"{tmp_path / 'absent'} (")
    assert "No such file or directory" in problem.text


def test_a_failure_that_passes_and_a_full_disk_are_no_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_probe, "PAUSE_S", 0.0)
    link, calls = os.link, iter([refuse])
    monkeypatch.setattr(os, "link", lambda *given: next(calls, link)(*given))
    assert check_folder(tmp_path) == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    assert check_folder(tmp_path) == []


def test_a_node_sees_what_node_0_wrote_and_locked(tmp_path: Path) -> None:
    shared = SharedProbe(tmp_path)
    assert check_folder(tmp_path, shared.folder.name, shared.token) == []
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_another_folder_at_the_same_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_probe, "SEEN_S", 0.2)
    shared = SharedProbe(tmp_path)
    (problem,) = compare(tmp_path / "elsewhere", shared.token)
    assert problem.lacks == "the same files"
    (problem,) = compare(shared.folder, "another")
    assert problem.lacks == "the same files"
    shared.close()


def test_of_two_processes_one_gets_each_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        winners = [sum(pool.map(race, [tmp_path] * 2, [number] * 2)) for number in range(RACES)]
    assert winners == [1] * RACES
    assert judge_races(winners) == []
    (problem,) = judge_races([1, 2, 1])
    assert "1 time of 3" in problem.text
