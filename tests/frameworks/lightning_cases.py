"""Interrupts a program at chosen points, and compares with full runs.

    python -m tests.frameworks.lightning_cases PROGRAM '{"kind": [["term", "batch", 3, 9]]}' FOLDER

PROGRAM is a module of this folder, `lightning_program` or `fabric_program`.

Each case of a kind is a signal, a place, its number there, and the steps between checkpoints. The
program is interrupted at that point once and started again by the same command. The last notes of
all ranks must be equal, bit for bit. Ranks are forked, to save the imports, and find the
environment that torchrun makes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from tests.support.forked_child import start_child
from tests.support.rank_programs import run_program
from tests.support.stops import hold_until_agreed

LAUNCH_S: Final = 90.0
LAUNCHES_MAX: Final = 3
POLL_S: Final = 0.01
SIGNALS: Final = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


def everywhere(places: range) -> list[list[Any]]:
    """Return cases of both signals at each of these batches."""
    return [
        case for at in places for case in (["term", "batch", at, 100], ["kill", "batch", at, 2])
    ]


def count_equal(
    program: str, cases: dict[str, list[list[Any]]], folder: Path, *, timeout_s: float
) -> int:
    """Run this module for a program, and return how many cases equal a full run.

    Raises AssertionError at the first case that does not.
    """
    arguments = program, json.dumps(cases), folder
    said = run_program("frameworks.lightning_cases", *arguments, timeout_s=timeout_s)
    return said.count("notes equal")


class Interruption:
    """Sends rank 0 a signal at one point of the first launch, while all ranks are there."""

    def __init__(self, folder: Path, kind: str, place: str, at: int) -> None:
        self._taken, self._kind, self._point = folder / "taken", kind, (place, at)

    def __call__(self, place: str, at: int) -> None:
        if (place, at) != self._point or self._taken.exists():
            return
        _meet()
        if os.environ["RANK"] == "0":
            self._taken.touch()
            os.kill(os.getpid(), SIGNALS[self._kind])
            hold_until_agreed()
        _meet()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def launch(program: Any, ranks: int, settings: dict[str, Any], mark: Any) -> list[int]:
    """Start `program.train` on `ranks` ranks, and return their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left = {_fork(program, rank, ranks, port, settings, mark): rank for rank in range(ranks)}
    codes, give_up = [0] * ranks, time.monotonic() + LAUNCH_S
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        has_failed = any(codes) or time.monotonic() > give_up
        for other in left if has_failed else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(POLL_S)
    return codes


def _fork(
    program: Any, rank: int, ranks: int, port: int, settings: dict[str, Any], mark: Any
) -> int:
    def train() -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "forked",
        }
        program.train(settings, mark)

    return start_child(train)


def notes_of(folder: Path, rank: int) -> dict[str, Any]:
    """The last note under each key."""
    lines = (folder / f"notes-{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def has_ended(folder: Path) -> bool:
    return "end" in notes_of(folder, 0)


def settings_of(kind: str, folder: Path, interval: int) -> dict[str, Any]:
    options = {"interval": interval, "directory": str(folder / "run"), "snapshots": "off"}
    return {"folder": str(folder), "kind": kind, "holdfast": options}


def compare(program: Any, kind: str, cases: list[tuple[str, str, int, int]], folder: Path) -> None:
    """Run a kind's cases. Raises AssertionError at the first difference."""
    ranks = 1 if kind in program.AT_ONE_RANK else 2
    full = folder / f"{kind}-full"
    full.mkdir()
    # A program that can run without Holdfast does so.
    stock = {**settings_of(kind, full, 1000), "stock": True}
    codes = launch(program, ranks, stock, lambda place, at: None)
    assert codes == [0] * ranks, (kind, codes)
    expected = [notes_of(full, rank) for rank in range(ranks)]
    for signal_name, place, at, interval in cases:
        name = f"{kind}-{signal_name}-{place}-{at}-{interval}"
        one = folder / name
        one.mkdir()
        mark = Interruption(one, signal_name, place, at)
        first = launch(program, ranks, settings_of(kind, one, interval), mark)
        assert (one / "taken").exists(), f"{name}: the point was not reached"
        assert (first == [0] * ranks) == (signal_name == "term"), (name, first)
        assert not has_ended(one), f"{name}: nothing was interrupted"
        again = launch(program, ranks, settings_of(kind, one, interval), mark)
        assert again == [0] * ranks, (name, again)
        for rank in range(ranks):
            found = notes_of(one, rank)
            differing = {
                key: (expected[rank].get(key), found.get(key))
                for key in expected[rank].keys() | found.keys()
                if expected[rank].get(key) != found.get(key)
            }
            assert not differing, f"{name}, rank {rank}: {differing}"
        print(f"{name}: {len(expected[0])} notes equal", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    program = importlib.import_module(f"tests.frameworks.{sys.argv[1]}")
    for kind, cases in json.loads(sys.argv[2]).items():
        compare(program, kind, [tuple(case) for case in cases], Path(sys.argv[3]))


if __name__ == "__main__":
    main()
