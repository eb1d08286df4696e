"""Which file system holds a path, whether hosts share it, and how late it shows other writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.contracts.disk import filesystems
from holdfast.contracts.disk.filesystems import CACHE_MARGIN_S, CACHE_S, LOCAL_DELAY_S, FileSystem


@pytest.mark.parametrize(
    ("kind", "options", "seconds"),
    [
        ("ext4", "rw", LOCAL_DELAY_S),
        ("overlay", "rw", LOCAL_DELAY_S),
        ("nfs4", "rw,vers=4.2,acdirmax=600", 600.0 + CACHE_MARGIN_S),
        ("nfs", "rw,acdirmin=3,acdirmax=5", CACHE_S + CACHE_MARGIN_S),
        ("lustre", "rw", CACHE_S + CACHE_MARGIN_S),
        ("dvs", "rw", CACHE_S + CACHE_MARGIN_S),
        ("gfs2", "rw", CACHE_S + CACHE_MARGIN_S),
        ("fuse.something_new", "rw", CACHE_S + CACHE_MARGIN_S),
    ],
)
def test_the_visibility_delay_depends_on_the_file_system(
    kind: str, options: str, seconds: float
) -> None:
    assert FileSystem(kind, options).delay_s == seconds


def test_the_file_system_of_a_path_is_its_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a b" / "inner"
    inner.mkdir(parents=True)
    point = str(inner).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"36 22 0:31 / {point} rw shared:2 master:1 - nfs4 srv:/x rw,acdirmax=120\n"
        "not a mount\n"
    )
    monkeypatch.setattr(filesystems, "MOUNTS", table)
    assert filesystems.filesystem_of(tmp_path).kind == "ext4"
    found = filesystems.filesystem_of(inner / "not there" / "yet")
    assert (found.kind, found.delay_s) == ("nfs4", 120.0 + CACHE_MARGIN_S)


def test_a_device_number_that_another_file_system_gets_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unmount, the kernel gives the number to the next mount, as with autofs."""
    table = tmp_path / "mountinfo"
    line = f"36 22 0:31 / {tmp_path} rw - %s source rw\n"
    monkeypatch.setattr(filesystems, "MOUNTS", table)
    # Another test may have looked at this device with a clock of its own.
    monkeypatch.setattr(filesystems, "_KNOWN", {})
    renewed: list[int] = []
    monkeypatch.setattr(os, "fsync", renewed.append)
    now = time.monotonic()
    with open(tmp_path / "journal", "wb") as journal:
        for seconds, kind, is_renewed in (
            (100.0, "fuse.other", False),
            (102.0, "fuse.glusterfs", True),
            (104.0, "ext4", False),
        ):
            table.write_text(line % kind)
            monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
            filesystems.fetch_attributes(journal.fileno())
            assert bool(renewed) is is_renewed
            renewed.clear()


@pytest.mark.parametrize(
    ("kind", "is_network", "may_be_shared"),
    [
        ("nfs4", True, True),
        ("fuse.juicefs", True, True),
        ("fuse.something_new", False, True),
        ("dvs", True, True),
        ("gfs2", True, True),
        ("tmpfs", False, False),
        ("xfs", False, False),
        ("", False, False),
    ],
)
def test_which_file_systems_may_be_shared(kind: str, is_network: bool, may_be_shared: bool) -> None:
    found = FileSystem(kind)
    assert (found.is_network, found.may_be_shared) == (is_network, may_be_shared)


def test_revalidate_leaves_no_files_behind(tmp_path: Path) -> None:
    filesystems.revalidate(tmp_path)
    filesystems.revalidate(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []
