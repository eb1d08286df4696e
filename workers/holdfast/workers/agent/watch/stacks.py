"""Take the stacks of a node's ranks by py-spy, or by faulthandler where py-spy is refused.

One thread per rank, all in parallel and in bounded time. The ranks are not stopped.
The texts are written to the dump's folder, and their summary is returned.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import make_directory
from holdfast.workers.agent.watch import kernel_view, nccl_ras, stack_text
from holdfast.workers.agent.watch.flight_recorder import RecordReader, take_flight_record

PY_SPY_S: Final = 3.0
# A stack that is read while the rank runs can be inconsistent, and is then read again. Ranks are
# never stopped for it: a rank that waits for storage may handle the stop only after py-spy has
# given up, and would then stay stopped.
PY_SPY_TRIES: Final = 3
# How many texts of a suspicion are kept: the first ones and the newest.
TEXTS_MAX: Final = 3
FAULT_WAIT_S: Final = 2.0
FAULT_SETTLED_S: Final = 0.05
FAULT_BYTES_MAX: Final = 1 << 20
POLL_S: Final = 0.01
THREADS_MAX: Final = 8
PROBLEM_CHARACTERS_MAX: Final = 300


@dataclass(frozen=True, kw_only=True)
class StackTarget:
    """A rank to examine; `offer` is the (signal, descriptor) of its faulthandler."""

    rank: int
    pid: int
    offer: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class StackSample:
    """The stacks of one node's ranks at one moment. `number` counts a suspicion's samples.

    `asks_ras` is True if the node now asks NCCL's RAS. The answer comes into the dump.
    """

    dump: int
    number: int
    stacks: tuple[stack_text.RankStack, ...]
    asks_ras: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "stacks": [stack.to_json() for stack in self.stacks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StackSample:
        stacks = tuple(stack_text.RankStack.from_json(stack) for stack in data["stacks"])
        return cls(**{**data, "stacks": stacks})


class StackTaker:
    """Takes one sample at a time, outside the agent's loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stacks")
        self._asked: tuple[int, int] = (0, 0)
        self._taking: Future[StackSample] | None = None
        self._records = RecordReader()

    @property
    def sample(self) -> StackSample | None:
        """The last requested sample, or None until it is complete."""
        if self._taking is None or not self._taking.done():
            return None
        return self._taking.result()

    def take(self, targets: list[StackTarget], folder: Path, dump: int, number: int) -> None:
        """Start to take a sample of `targets`; do nothing if it was already requested."""
        if self._asked == (dump, number):
            return
        self._asked = (dump, number)
        self._taking = self._pool.submit(self._take_all, targets, folder, dump, number)

    def close(self) -> None:
        """Wait for a sample in progress, which is bounded in time."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._records.close()

    def _take_all(
        self, targets: list[StackTarget], folder: Path, dump: int, number: int
    ) -> StackSample:
        with contextlib.suppress(OSError):
            make_directory(folder)
        with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="stack") as pool:
            taken = [pool.submit(_take, target, folder, number) for target in targets]
            stacks = tuple(future.result() for future in taken)
        if any(stack.has_record for stack in stacks):
            self._records.start(folder)
        asks_ras = nccl_ras.start_asking([target.pid for target in targets], folder, number)
        return StackSample(dump=dump, number=number, stacks=stacks, asks_ras=asks_ras)


def _take(target: StackTarget, folder: Path, number: int) -> stack_text.RankStack:
    """Return one rank's stacks; with a suspicion's first sample, also take its flight record."""
    stack, text = take_stack(target)
    below = kernel_view.look_below(target.pid)
    stack = replace(
        stack,
        computed_s=below.computed_s,
        on_storage=below.on_storage,
        helpers_cpu_s=below.cpu_s,
        helpers_io_bytes=below.io_bytes,
    )
    # A full file system loses the text. The summary still goes to node 0.
    with contextlib.suppress(OSError):
        path = folder / f"rank-{target.rank:05d}.{min(number, TEXTS_MAX)}.txt"
        path.write_text(text or f"{stack_text.NO_STACKS}{stack.problem}\n", errors="replace")
        path.chmod(0o600)
        if number == 1:
            record = take_flight_record(target.pid, target.rank, folder)
            stack = replace(stack, has_record=record is not None)
    return stack


def take_stack(target: StackTarget) -> tuple[stack_text.RankStack, str]:
    """Return the summary and text of a process's stacks; without stacks the summary says why."""
    problems = []
    for way in (_by_py_spy, _by_faulthandler):
        try:
            return way(target)
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            problems.append(str(error)[:PROBLEM_CHARACTERS_MAX])
    return stack_text.RankStack(rank=target.rank, problem="; ".join(problems)), ""


def _by_py_spy(target: StackTarget) -> tuple[stack_text.RankStack, str]:
    """Return py-spy's stacks. Raises `OSError` or `ValueError` with its message on failure."""
    program = shutil.which("py-spy", path=_beside_python())
    if program is None:
        raise OSError("py-spy is not installed")
    command = [program, "dump", "--json", "--locals", "--nonblocking", "--pid", str(target.pid)]
    give_up = time.monotonic() + PY_SPY_S
    problem = ""
    for _ in range(PY_SPY_TRIES):
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            break
        done = subprocess.run(command, capture_output=True, timeout=left_s, check=False)
        problem = done.stderr.decode(errors="replace").strip()
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return stack_text.read_py_spy(target.rank, target.pid, done.stdout)
        if "ermission" in problem:
            break
    raise ValueError(f"py-spy: {problem or f'no stacks within {PY_SPY_S:.0f} s'}")


def _by_faulthandler(target: StackTarget) -> tuple[stack_text.RankStack, str]:
    """Return what the rank's own handler writes on its signal. Raises `OSError`, `ValueError`.

    Only a rank that offered this is signalled, because the signal would kill any other.
    """
    number, descriptor = target.offer
    if not number:
        raise OSError("the rank has no faulthandler")
    with open(f"/proc/{target.pid}/fd/{descriptor}", "rb") as stream:
        before = stream.seek(0, os.SEEK_END)
        os.kill(target.pid, number)
        give_up, size, settled_at = time.monotonic() + FAULT_WAIT_S, before, 0.0
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            now, size_now = time.monotonic(), stream.seek(0, os.SEEK_END)
            if size_now != size:
                size, settled_at = size_now, now + FAULT_SETTLED_S
            elif settled_at and now > settled_at:
                break
        stream.seek(before)
        return stack_text.read_faulthandler(
            target.rank, stream.read(FAULT_BYTES_MAX).decode(errors="replace")
        )


def _beside_python() -> str:
    """Return the search path for programs: this Python's folder, then the usual ones."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
