"""NCCL's flight recorder: which collectives a rank has begun and not ended.

PyTorch keeps the record in the rank. A byte into the rank's pipe, which the environment names
(`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`), makes a thread of it write the record to a file, from where it
is taken into the dump. Read one with `torchfrtrace`. Where there is no pipe, there is no record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

PIPE: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
BUFFERS: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
ENTRIES: Final = 2000
# PyTorch's own default, for a program that set the pipe by itself.
DEFAULT_FILE: Final = "/tmp/nccl_trace_rank_"
# The thread that serves the pipe looks at it once in a second.
WAIT_S: Final = 4.0
SETTLED_S: Final = 0.2
POLL_S: Final = 0.05


def recorder_environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """What makes ranks on GPUs keep a record and serve a pipe in `folder`: pure.

    A program that says anything of this itself is left alone.
    """
    if any(name in inherited for name in (PIPE, *FILES, *BUFFERS)):
        return {}
    return {
        PIPE: str(folder / "nccl-rank-"),
        **dict.fromkeys(FILES, str(folder / "nccl-record-")),
        **dict.fromkeys(BUFFERS, str(ENTRIES)),
    }


def take_flight_record(pid: int, rank: int, folder: Path) -> Path | None:
    """Have the process write its record and copy it into `folder`; None where it has none."""
    try:
        variables = psutil.Process(pid).environ()
    except psutil.Error:
        return None
    pipe = Path(f"{variables.get(PIPE, '')}{rank}.pipe")
    prefix = next((variables[name] for name in FILES if name in variables), DEFAULT_FILE)
    record = Path(f"{prefix}{rank}")
    if PIPE not in variables or not pipe.is_fifo():
        return None
    before = _state(record)
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        # Nobody reads it: the rank has no process group of NCCL's.
        return None
    with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as stream:
        stream.write(b"1")
        if not _wait_for(record, before):
            return None
    target = folder / f"nccl-rank-{rank:05d}"
    shutil.copyfile(record, target)
    return target


def _wait_for(record: Path, before: tuple[int, int]) -> bool:
    """True once the record is another one than `before` and grows no more."""
    give_up = time.monotonic() + WAIT_S
    last, since = before, time.monotonic()
    while time.monotonic() < give_up:
        now = _state(record)
        if now != last:
            last, since = now, time.monotonic()
        elif now != before and time.monotonic() - since >= SETTLED_S:
            return True
        time.sleep(POLL_S)
    return False


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
