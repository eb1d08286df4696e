"""Files of other users are opened without blocking and without following links outside."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.contracts.disk.reading import (
    held_folder,
    is_mine,
    open_beneath,
    open_regular,
    read_bounded,
    walk_inside,
)
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.plain_text import plain, plain_line, plain_output

FLAGS = os.O_RDONLY | os.O_NONBLOCK


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with regular files, links of every kind, and special files."""
    run = tmp_path / "run"
    (run / "a").mkdir(parents=True)
    (run / "a" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (run / "near").symlink_to("a/file")
    (run / "folder").symlink_to("a")
    (run / "up").symlink_to("../secret")
    (run / "absolute").symlink_to(tmp_path / "secret")
    (run / "loop").symlink_to("loop")
    (run / "kernel").symlink_to("/proc/self/environ")
    os.mkfifo(run / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(run / "socket"))
    with open(run / "sparse", "wb") as stream:
        stream.truncate(20 << 30)
    return run


def by_kernel(run: Path, name: str, follow: bool) -> int:
    return open_beneath(run / name, FLAGS, below=run, follow=follow)


def by_walk(run: Path, name: str, follow: bool) -> int:
    base = os.open(run, os.O_PATH | os.O_DIRECTORY)
    try:
        return walk_inside(base, name, FLAGS, follow)
    finally:
        os.close(base)


@pytest.mark.parametrize("opener", [by_kernel, by_walk])
@pytest.mark.parametrize(
    ("name", "plainly", "following"),
    [
        ("a/file", True, True),
        ("a/../a/file", True, True),
        ("near", False, True),
        ("folder/file", False, True),
        ("up", False, False),
        ("a/../../secret", False, False),
        ("absolute", False, False),
        ("kernel", False, False),
        ("loop", False, False),
    ],
)
def test_no_link_opens_a_file_outside_the_folder(
    run: Path, opener: Callable[[Path, str, bool], int], name: str, plainly: bool, following: bool
) -> None:
    for follow, may in ((False, plainly), (True, following)):
        if may:
            handle = opener(run, name, follow)
            assert os.read(handle, 100) == b"inside"
            os.close(handle)
        else:
            with pytest.raises((OSError, ForeignFileError)):
                opener(run, name, follow)


@pytest.mark.parametrize(
    "name", ["pipe", "socket", "sparse", "near", "up", "absolute", "loop", "kernel", "a"]
)
def test_anything_but_a_regular_file_is_refused_at_once(run: Path, name: str) -> None:
    began = time.monotonic()
    for below in (None, run):
        with pytest.raises((ForeignFileError, OSError), match=name):
            read_bounded(run / name, 1024, below=below)
    for device in ("/dev/zero", "/dev/tty"):
        with pytest.raises((ForeignFileError, OSError)):
            read_bounded(device, 1024)
    assert time.monotonic() - began < 1


def test_read_bounded_returns_the_whole_file_or_raises(run: Path) -> None:
    assert read_bounded(run / "a" / "file", 6, below=run) == b"inside"
    assert read_bounded(run / "near", 6, below=run, follow=True) == b"inside"
    with pytest.raises(ForeignFileError, match="6 bytes, expected 5 or less"):
        read_bounded(run / "a" / "file", 5)
    with pytest.raises(FileNotFoundError, match="none"):
        read_bounded(run / "none", 5, below=run)


def test_a_link_swapped_while_it_is_read_never_leads_outside(run: Path) -> None:
    """The target changes all the time; each read returns the inside file or is refused."""
    link, other = run / "a" / "swapped", run / "a" / "next"
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for target in ("file", "../../secret"):
                other.symlink_to(target)
                os.replace(other, link)

    link.symlink_to("file")
    attacker = threading.Thread(target=swap, daemon=True)
    attacker.start()
    seen = []
    try:
        for _ in range(3000):
            try:
                seen.append(read_bounded(link, 100, below=run, follow=True))
            except (ForeignFileError, FileNotFoundError):
                seen.append(b"")
    finally:
        over.set()
        attacker.join(5)
    assert set(seen) == {b"inside", b""}


def test_a_held_folder_is_still_the_opened_one_after_a_rename(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    with held_folder(run / "a", below=run) as held:
        (run / "a").rename(run / "b")
        (run / "a").symlink_to(victim)
        (held / "mark").write_text("x")
    assert (run / "b" / "mark").exists()
    assert not list(victim.iterdir())
    with pytest.raises(ForeignFileError), held_folder(run / "a", below=run):
        pass


def test_is_mine_accepts_own_and_root_folders(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = run.stat().st_uid
    assert is_mine(run)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    # Everybody can trust files of root, but not those of another user.
    assert is_mine(run) == (owner == 0)
    assert is_mine(Path("/"))


def test_no_descriptor_is_left_open(run: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a/file", "pipe", "up", "loop", "none", "a"):
        for follow in (False, True):
            for opener in (by_kernel, by_walk):
                with contextlib.suppress(OSError, ForeignFileError):
                    os.close(opener(run, name, follow))
            with contextlib.suppress(OSError, ForeignFileError):
                os.close(open_regular(run / name, below=run, follow=follow))
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_control_character_reaches_a_terminal() -> None:
    evil = "a\x1b]0;title\x07b\x9b2Jc\x08\u202ed\ud8ff\r"
    assert plain(evil) == "a\\x1b]0;title\\x07b\\x9b2Jc\\x08\\u202ed\\ud8ff\\x0d".replace(
        "\\x0d", "\\r"
    )
    assert plain("a\tb\nc é 你") == "a\tb\nc é 你"
    assert plain_line("a\nb") == "a b"
    assert plain_output("\x1b[1;31mred\x1b[0m 10%\r20%\n\x1b[2J") == "red 10%\r20%\n\\x1b[2J"
