"""NCCL's flight recorder: which collectives a rank has started and not finished.

PyTorch keeps the record in the rank. A byte written to the rank's pipe, which the environment names
(`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`), makes a thread of the rank write the record to a file. That
file is copied into the dump. Without a pipe there is no record.

`RecordReader` has the records of a node summarised, in a process with torch and the reader for
untrusted pickles. `MergedRecords` merges the summaries of all nodes, on node 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.disk.reading import open_regular, read_bounded
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.node.flight import FILE, RECORD_BYTES_MAX, RankFlight
from holdfast.workers.agent.watch.collectives import CollectiveBlame, find_missing

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
READER: Final = "holdfast.trainer.flight_records"
# A reader needs a few seconds, mostly for the import of torch.
MERGE_S_MAX: Final = 60.0
MERGE_POLL_S: Final = 1.0
SUMMARY_BYTES_MAX: Final = 16 << 20


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
    try:
        with open(open_regular(record), "rb") as source, open(target, "wb") as copy:
            if os.fstat(source.fileno()).st_size > RECORD_BYTES_MAX:
                return None
            shutil.copyfileobj(source, copy)
    except ForeignFileError:
        return None
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


class RecordReader:
    """Has the records of one dump of this node summarised, by a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> None:
        """Start to summarise the records in `folder`, instead of an earlier dump's."""
        self.close()
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", READER, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # `python -m` searches the current folder first.
                cwd="/",
            )

    def close(self) -> None:
        """End the process if it still reads."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class MergedRecords:
    """Reads the nodes' summaries of one dump in a thread, and merges them into one finding."""

    def __init__(self, folders: Sequence[Path], world_size: int) -> None:
        """`folders` are the dumps of the nodes whose ranks gave records."""
        self.blame: CollectiveBlame | None = None
        self._folders, self._world_size = folders, world_size
        threading.Thread(target=self._run, name="flight-records", daemon=True).start()

    def _run(self) -> None:
        give_up = time.monotonic() + MERGE_S_MAX
        found: dict[Path, list[RankFlight]] = {}
        while len(found) < len(self._folders) and time.monotonic() < give_up:
            time.sleep(MERGE_POLL_S)
            for folder in self._folders:
                if folder not in found and (records := read_summaries(folder)) is not None:
                    found[folder] = records
        records = [one for of_node in found.values() for one in of_node]
        if records:
            with contextlib.suppress(ValueError):
                self.blame = find_missing(records, self._world_size)


def read_summaries(folder: Path, *, below: Path | None = None) -> list[RankFlight] | None:
    """Return the summaries of the records in `folder`, or None if there are none yet.

    With `below`, no part of the path under that folder may be a link.
    """
    try:
        content = json.loads(read_bounded(folder / FILE, SUMMARY_BYTES_MAX, below=below))
        return [RankFlight.from_json(one) for one in content["ranks"]]
    except (OSError, ForeignFileError, ValueError, LookupError, TypeError, RecursionError):
        return None
