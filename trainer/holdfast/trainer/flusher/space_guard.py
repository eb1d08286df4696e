"""Space checks before a step is written: free space on storage, and the checkpoint budget.

If a step does not fit, the space guard asks the flusher supervisor once to delete checkpoints that
the keep rules allow, and waits a bounded time. It keeps the last percent of a disk (at most
`MARGIN_BYTES_MAX`) free for journals, logs and manifests.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.trainer.slots.slot_table import SlotTable

MARGIN_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_WAIT_S: Final = 120.0


@dataclass(frozen=True)
class Need:
    """The approximate size of a step: `bytes` on this node, `step_bytes` on all nodes together."""

    step: int
    bytes: int
    step_bytes: int

    @classmethod
    def of_tables(cls, tables: Sequence[SlotTable]) -> Need:
        """Return the need of one node's slot tables. Nodes hold about equal shares of a step."""
        size = sum(file.bytes for table in tables for file in table.files)
        return cls(tables[0].step, size, size * tables[0].nodes)


def find_shortage(
    need: Need, *, free: int | None, total: int, budget: int | None, taken: int
) -> OSError | None:
    """Return an error if the step does not fit. Sizes in bytes; `free` is None if unknown."""
    # Journals, heartbeats and the outcome still need space when checkpoints have filled the disk,
    # see decision 12.
    margin = min(MARGIN_BYTES_MAX, total // 100)
    if free is not None and need.bytes + margin > free:
        return OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: step {need.step} needs {need.bytes} bytes here and a "
            f"reserve of {margin} bytes, but {free} bytes are free",
        )
    if budget is not None and taken + need.step_bytes > budget:
        return OSError(
            errno.EDQUOT,
            f"{os.strerror(errno.EDQUOT)}: step {need.step} needs {need.step_bytes} bytes, but "
            f"the run's checkpoints use {taken} of the {budget} bytes of checkpoint.budget",
        )
    return None


class SpaceGuard:
    """Checks for space and asks the flusher supervisor for more, for one step at a time."""

    def __init__(self, budget: int | None, ask_supervisor: Callable[[Need, str], bool]) -> None:
        """`ask_supervisor` sends the request. It returns False if there is no flusher supervisor
        to answer."""
        self._budget = budget
        self._ask_supervisor = ask_supervisor
        self._sizes: dict[str, int] = {}
        self._answered = threading.Condition()
        self._asked_step: int | None = None
        self._answer: dict[str, Any] | None = None

    def check(self, run: RunPaths, directory: Path, need: Need, *, node: int) -> None:
        """Raise `OSError` (ENOSPC, EDQUOT) if the step will not fit. Node 0 checks the budget."""
        free, total = _space_at(directory)
        # The budget covers all nodes' files together, so one node is enough to check it.
        budget = self._budget if node == 0 else None
        taken = self._taken(run, directory.name) if budget is not None else 0
        shortage = find_shortage(need, free=free, total=total, budget=budget, taken=taken)
        if shortage is not None:
            raise shortage

    def ask(self, need: Need, problem: OSError) -> tuple[int, str]:
        """Return (freed bytes, the supervisor's explanation). Waits at most `ANSWER_WAIT_S`."""
        with self._answered:
            self._asked_step, self._answer = need.step, None
            if not self._ask_supervisor(need, str(problem)):
                return 0, "no supervisor is connected that could free space"
            # Bounded: a supervisor that hangs must not hold up training for ever.
            self._answered.wait_for(
                lambda: self._answer is not None or self._asked_step is None, ANSWER_WAIT_S
            )
            answer, self._asked_step = self._answer, None
        if answer is None:
            return 0, f"the supervisor did not answer within {ANSWER_WAIT_S:.0f} s"
        return int(answer["freed_bytes"]), str(answer["detail"])

    def hear(self, message: dict[str, Any]) -> None:
        """Take the flusher supervisor's answer. An answer to an earlier request is ignored."""
        with self._answered:
            if message["step"] == self._asked_step:
                self._answer = message
                self._answered.notify_all()

    def hang_up(self) -> None:
        """End the wait: the flusher supervisor is gone."""
        with self._answered:
            self._asked_step = None
            self._answered.notify_all()

    def _taken(self, run: RunPaths, besides: str) -> int:
        """Return the bytes of the run's other checkpoints. Sizes of committed ones are cached."""
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


def with_advice(problem: OSError, advice: str) -> OSError:
    """Return the same error with the flusher supervisor's explanation."""
    return OSError(problem.errno, f"{problem.strerror}; {advice}")


def _space_at(directory: Path) -> tuple[int | None, int]:
    """Return (free bytes, total bytes) of the storage that will hold `directory`."""
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
    """Return the bytes of all files in a directory. Files that vanish meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except OSError:
                continue
    return total
