"""`holdfast doctor`: each check of the page on troubleshooting warns or fails once, with its step.

Memory, disks, programs and sockets are real where a test can make them small or take them away.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from tests.docs.blocks import ROOT
from tests.support.storage import small_storage

from holdfast.cli import doctor
from holdfast.cli.doctor import CheckResult, run_checks

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
AWAY = "http://127.0.0.1:9/api"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_page_has_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    rows = re.findall(r"^\| `([\w ]+)` \|", PAGE[PAGE.index("### What `holdfast doctor`") :], re.M)
    assert rows == [found.name for found in run_checks(tmp_path / "root")]


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
        found = doctor.check_python()
    assert (found.level, found.next_step) == ("fail", "install Python 3.11 or newer")
    assert doctor.check_python().level == "ok"


def test_an_environment_without_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bare = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
        patch.setattr(sys, "executable", bare)
        found = doctor.check_torch()
        assert (found.level, found.detail) == ("warn", "missing torch, numpy, psutil, submitit")
        patch.setattr(sys, "executable", str(tmp_path / "none"))
        assert doctor.check_torch().level == "fail"
    assert doctor.check_torch().level == "ok"


@pytest.mark.root
def test_a_root_in_memory_or_without_space(tmp_path: Path) -> None:
    with small_storage(tmp_path, "1m") as memory:
        root, space = doctor.check_root(memory), doctor.check_space(memory / "root")
    assert (root.level, "is in memory (tmpfs)" in root.detail) == ("warn", True)
    assert (space.level, "holdfast prune" in space.next_step) == ("warn", True)
    assert doctor.check_root(tmp_path / "root").level == "ok"
    (tmp_path / "file").touch()
    assert doctor.check_root(tmp_path / "file" / "root").level == "fail"


def test_an_index_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", "sqlite:////proc/nowhere/index.db")
    found = doctor.check_database()
    assert (found.level, "cannot be created" in found.detail) == ("fail", True)
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", f"sqlite:///{tmp_path}/index.db")
    assert doctor.check_database().level == "ok"


@pytest.mark.more
def test_an_api_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", AWAY)
    with temporary_settings({PREFECT_API_URL: AWAY}):
        found = doctor.check_service()
    assert (found.level, "does not answer" in found.detail) == ("fail", True)


@pytest.mark.parametrize(
    ("there", "answer", "level", "words"),
    [
        (["sbatch"], "exit 0", "fail", "squeue, sacct, scontrol, scancel missing"),
        (
            doctor.SLURM,
            "echo 'Unable to contact slurm controller' >&2; exit 1",
            "warn",
            "Unable to contact slurm controller",
        ),
        ([], "", "ok", "not installed"),
    ],
)
def test_slurm_in_part_or_away(
    there: list[str],
    answer: str,
    level: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in there:
        script(tmp_path / name, answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor.check_slurm()
    assert (found.level, words in found.detail) == (level, True), found


def test_memory_files_that_are_forbidden_or_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def found_with(target: Any, name: str, value: Any) -> CheckResult:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return doctor.check_memory_files()

    assert found_with(os, "memfd_create", forbidden).level == "fail"
    usage = shutil.disk_usage("/dev/shm")
    for free, level in ((2**28 - 1, "warn"), (2**28, "ok")):
        small = usage._replace(free=free)
        found = found_with(shutil, "disk_usage", lambda _, small=small: small)
        assert (found.level, "--shm-size" in found.next_step) == (level, level == "warn")
