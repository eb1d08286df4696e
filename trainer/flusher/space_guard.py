"""Checks before a step is written: free space of the storage, and what is left of the budget.

When it does not fit, the flusher supervisor is asked to free what the keep rules allow, once, and
the wait for its answer is bounded. The last percent of a disk (at most `MARGIN_BYTES_MAX`) is left
to journals, logs and manifests: a save that fills it would take the run's own words along.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.paths import MANIFEST, RunPaths

MARGIN_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_WAIT_S: Final = 120.0
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Need:
    """What a step takes: `bytes` on this node, `step_bytes` on all nodes together, about."""

    step: int
    bytes: int
    step_bytes: int

    @classmethod
    def of_tables(cls, tables: Sequence[dict[str, Any]]) -> Need:
        """The need of one node's slot tables; nodes hold about equal shares of a step."""
        size = sum(file["bytes"] for table in tables for file in table["files"])
        return cls(tables[0]["step"], size, size * tables[0]["nodes"])


def find_shortage(
    need: Need, *, free: int | None, total: int, budget: int | None, taken: int
) -> OSError | None:
    """Why the step does not fit, or None. Pure; all in bytes, `free` None where none can say."""
    margin = min(MARGIN_BYTES_MAX, total // 100)
    if free is not None and need.bytes + margin > free:
        return OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: step {need.step} needs {need.bytes} bytes here and "
            f"{margin} in reserve, {free} are free",
        )
    if budget is not None and taken + need.step_bytes > budget:
        return OSError(
            errno.EDQUOT,
            f"{os.strerror(errno.EDQUOT)}: step {need.step} needs {need.step_bytes} bytes, and "
            f"{taken} of checkpoint.budget's {budget} are taken by the run's checkpoints",
        )
    return None


class SpaceGuard:
    """Checks for room, and asks the flusher supervisor for more; one step at a time."""

    def __init__(self, budget: int | None, ask_supervisor: Callable[[Need, str], bool]) -> None:
        """`ask_supervisor` sends the question and says whether there is a flusher supervisor to
        answer it."""
        self._budget = budget
        self._ask_supervisor = ask_supervisor
        self._sizes: dict[str, int] = {}
        self._answered = threading.Condition()
        self._asked_step: int | None = None
        self._answer: dict[str, Any] | None = None

    def check(self, run: RunPaths, directory: Path, need: Need, *, node: int) -> None:
        """Raise `OSError` (ENOSPC, EDQUOT) when the step will not fit. Node 0 minds the budget."""
        free, total = _space_at(directory)
        budget = self._budget if node == 0 else None
        taken = self._taken(run, directory.name) if budget is not None else 0
        shortage = find_shortage(need, free=free, total=total, budget=budget, taken=taken)
        if shortage is not None:
            raise shortage

    def ask(self, need: Need, problem: OSError) -> tuple[int, str]:
        """(bytes that were freed, the supervisor's words); waits `ANSWER_WAIT_S` at most."""
        with self._answered:
            self._asked_step, self._answer = need.step, None
            if not self._ask_supervisor(need, str(problem)):
                return 0, "nobody is there to free room"
            self._answered.wait_for(
                lambda: self._answer is not None or self._asked_step is None, ANSWER_WAIT_S
            )
            answer, self._asked_step = self._answer, None
        if answer is None:
            return 0, f"no answer within {ANSWER_WAIT_S:.0f} s to the question for room"
        return int(answer["freed_bytes"]), str(answer["detail"])

    def hear(self, message: dict[str, Any]) -> None:
        """The flusher supervisor's answer; one to an earlier question is passed over."""
        with self._answered:
            if message["step"] == self._asked_step:
                self._answer = message
                self._answered.notify_all()

    def hang_up(self) -> None:
        """The flusher supervisor is gone: wait no longer."""
        with self._answered:
            self._asked_step = None
            self._answered.notify_all()

    def _taken(self, run: RunPaths, besides: str) -> int:
        """Bytes of the run's checkpoints but one; a committed one's size is looked up once."""
        sizes = {}
        for directory in [*run.list_checkpoints(), *run.list_removing()]:
            name = directory.name
            if name == besides:
                continue
            known = self._sizes.get(name)
            sizes[name] = known if known is not None else _bytes_below(directory)
        self._sizes = {
            name: size for name, size in sizes.items() if (run.checkpoint(name) / MANIFEST).exists()
        }
        return sum(sizes.values())


def with_advice(problem: OSError, words: str) -> OSError:
    """The same error with what the flusher supervisor said of it."""
    return OSError(problem.errno, f"{problem.strerror}; {words}")


def _space_at(directory: Path) -> tuple[int | None, int]:
    """(free bytes, all bytes) of the storage that will hold `directory`."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        facts = os.statvfs(place)
    except OSError:
        return None, 0
    total = facts.f_blocks * facts.f_frsize
    return (facts.f_bavail * facts.f_frsize if total else None), total


def _bytes_below(directory: Path) -> int:
    """Bytes of all files in a directory; what vanishes meanwhile counts for nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except OSError:
                continue
    return total
