"""torchrun's log in memory: what was written is read at once, and copied to storage when it can."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from holdfast.workers.agent.launch import torchrun
from holdfast.workers.agent.launch.torchrun import LocalLog

WAIT_S = 20.0


def write(log: LocalLog, text: str) -> None:
    """Write from another process, as torchrun does."""
    subprocess.run(
        ["printf", "%s", text], stdout=log.handle, stderr=log.handle, check=True, timeout=WAIT_S
    )


def test_output_is_read_at_once_and_copied_to_storage(tmp_path: Path) -> None:
    path = tmp_path / "torchrun.log"
    log = LocalLog(path)
    write(log, "first\n")
    write(log, "second ü\n")
    assert log.tail(100) == "first\nsecond ü\n"
    # A character that the limit cuts in two is replaced.
    assert log.tail(2) == "\N{REPLACEMENT CHARACTER}\n"
    log.close()
    assert path.read_text() == "first\nsecond ü\n"
    # The log is still needed when the process has ended.
    assert log.tail(100) == "first\nsecond ü\n"


def test_absent_storage_delays_only_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "COPY_S", 0.05)
    path = tmp_path / "away" / "torchrun.log"
    log = LocalLog(path)
    write(log, "written while the storage was away\n")
    time.sleep(0.3)
    assert log.tail(7) == "s away\n"
    path.parent.mkdir()
    give_up = time.monotonic() + WAIT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < give_up
        time.sleep(0.02)
    log.close()
    assert path.read_text() == "written while the storage was away\n"
