"""Lines of Holdfast on a full disk: they may be lost, and nothing else."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.node.reporting import report
from holdfast.trainer.flusher.hints import log
from holdfast.trainer.metrics import Recorder


def test_lines_that_a_full_disk_refuses_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        patch.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="No space"):
            print("refused", flush=True)
        report("lost")
        report("lost too", is_error=True)
        log("the flusher's line")
        # What is still buffered would fail again when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_rank_0_journals_again_after_a_full_disk_refused_a_line_and_the_report_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended before, and the run was silent about each failed save after that."""
    write = JournalWriter._write
    refused: list[EventKind] = []

    def write_half(self: JournalWriter, kind: EventKind, data: dict[str, Any]) -> Any:
        if not refused:
            refused.append(kind)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, kind, data)

    monkeypatch.setattr(JournalWriter, "_write", write_half)
    path = tmp_path / "journal" / "rank0.jsonl"
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        recorder = Recorder(path, tmp_path / "metrics" / "a0001.l01.jsonl", attempt=1)
        recorder.event(EventKind.STAGED, step=20, checkpoint="x", bytes=1, blocked_s=0.1)
        recorder.event(EventKind.NOTE, text="the next line")
        recorder.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert refused == [EventKind.STAGED]
    assert [event.kind for event in read_journal(path)[0]] == [EventKind.NOTE]
