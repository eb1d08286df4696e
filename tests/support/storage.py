"""A small separate file system that a test can fill."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_storage(folder: Path, size: str, options: str = "") -> Iterator[Path]:
    """A mounted tmpfs of `size` under `folder`; it needs root and fails the test otherwise.

    `options` are further options of `mount`, such as `nr_inodes=20`.
    """
    place = folder / "storage"
    place.mkdir()
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={size},{options}".rstrip(","),
        "tmpfs",
        str(place),
    ]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.fail(f"a full disk cannot be tried here: {mounted.stderr}; run the tests as root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
