"""NCCL's flight recorder: which collectives a rank has started and not finished.

PyTorch keeps the record in the rank. A byte written to the rank's pipe, which the environment names
(`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`), makes a thread of the rank write the record to a file. That
file is copied into the dump. Read it with `torchfrtrace`. Without a pipe there is no record.
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
# PyTorch's own default, for a program that set the pipe itself.
DEFAULT_FILE: Final = "/tmp/nccl_trace_rank_"
# The thread that serves the pipe checks it once a second.
WAIT_S: Final = 4.0
SETTLED_S: Final = 0.2
POLL_S: Final = 0.05


def recorder_environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks on GPUs keep a record and serve a pipe in `folder`.

    Empty if the program sets any of these variables itself. This function is pure.
    """
    if any(name in inherited for name in (PIPE, *FILES, *BUFFERS)):
        return {}
    return {
        PIPE: str(folder / "nccl-rank-"),
        **dict.fromkeys(FILES, str(folder / "nccl-record-")),
        **dict.fromkeys(BUFFERS, str(ENTRIES)),
    }


def take_flight_record(pid: int, rank: int, folder: Path) -> Path | None:
    """Have the process write its record and copy it into `folder`; return None without one."""
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
        # No thread reads the pipe: the rank has no NCCL process group.
        return None
    with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as stream:
        stream.write(b"1")
        if not _wait_for(record, before):
            return None
    target = folder / f"nccl-rank-{rank:05d}"
    shutil.copyfile(record, target)
    return target


def _wait_for(record: Path, before: tuple[int, int]) -> bool:
    """Return True once the record has changed and no longer grows."""
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
