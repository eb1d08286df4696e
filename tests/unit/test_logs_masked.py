"""`holdfast logs` masks secrets, also in files that are truncated, growing or binary."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from holdfast.cli import logs
from holdfast.contracts.disk.rank_logs import RankLog
from holdfast.contracts.redaction import AROUND_BYTES

VALUE: Final = "Zq8vR3mK1xWn"
STARS: Final = "*" * len(VALUE)

Read = Callable[..., str]


def log_at(path: Path) -> RankLog:
    """The log of rank 0 in a file of this name."""
    return RankLog(path, path.parent, "node-0000", 1, 0, "stdout", bytes=0, changed_at=0.0)


@pytest.fixture
def read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Read]:
    """A log, and a function that returns what a reader that knows `VALUE` newly prints of it."""
    lines = logs.LineFilter(grep=None, tail=None, show_rank=False)
    reader, path = logs._Reader((VALUE,), lines), tmp_path / "rank.log"

    def read_on(*, is_last: bool) -> str:
        reader.print_new([log_at(path)], is_last=is_last)
        return capsys.readouterr().out

    return path, read_on


def test_a_secret_that_is_written_in_two_parts_is_masked(read: tuple[Path, Read]) -> None:
    path, read_on = read
    path.write_text(f"token: {VALUE[:5]}")
    first = read_on(is_last=False)
    assert VALUE[:1] not in first
    path.write_text(f"token: {VALUE} is it\nloss Zq8")
    assert first + read_on(is_last=False) == f"token: {STARS} is it\nloss "
    # A prefix that turns out to be no secret is printed with the next text, or at the end.
    assert read_on(is_last=True) == "Zq8"


def test_a_secret_across_two_reads_is_masked(
    read: tuple[Path, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_on = read
    monkeypatch.setattr(logs, "READ_BYTES_MAX", 7)
    path.write_text(f"one {VALUE} two {VALUE}\n")
    assert read_on(is_last=True) == f"one {STARS} two {STARS}\n"


def test_a_tail_that_begins_inside_a_secret_is_masked(
    read: tuple[Path, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_on = read
    monkeypatch.setattr(logs, "PRINTED_BYTES_MAX", 10)
    path.write_text(f"one {VALUE} two")
    assert read_on(is_last=True) == "****** two"
    monkeypatch.setattr(logs, "JSON_BYTES_MAX", 10)
    assert logs._masked_tail(log_at(path), (VALUE,)) == "****** two"


def test_text_that_looks_like_a_secret_is_masked(read: tuple[Path, Read]) -> None:
    path, read_on = read
    path.write_text("HF_TOKEN=abcdef123456 python train.py\n")
    assert read_on(is_last=True) == f"HF_TOKEN={'*' * 12} python train.py\n"


def test_large_binary_output_is_printed_in_bounded_time(
    read: tuple[Path, Read],
) -> None:
    path, read_on = read
    noise = os.urandom(1 << 20) + b"Zq8v" * 50_000 + b"a=b " * 100_000
    path.write_bytes(noise + VALUE.encode() + b"\0" * AROUND_BYTES + b"\xff\xfe end\n")
    began = time.monotonic()
    printed = read_on(is_last=True)
    assert time.monotonic() - began < 20
    assert VALUE not in printed
    assert printed.endswith(" end\n")
