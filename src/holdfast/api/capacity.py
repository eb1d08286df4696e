"""What is free now: GPUs by the answers of the schedulers, and space in the roots."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from holdfast.api.findings import Finding, finding
from holdfast.api.schemas import Capacity
from holdfast.contracts.disk.digests import document_digest
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.spec.resources import Resources
from holdfast.workers.schedulers import executor_for

# Many pages may ask at the same time, and each answer costs the scheduler some calls.
FRESH_S: Final = 10.0
KEPT_MAX: Final = 256
REASON_CHARACTERS_MAX: Final = 300
FREE_SHARE_MIN: Final = 0.05
# So many checkpoints of every live run should fit.
CHECKPOINTS_MIN: Final = 3
_GIB: Final = 2**30


class FreeGpus:
    """Asks the schedulers, and shares each answer for `FRESH_S` seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[float, Capacity]] = {}

    def ask(self, resources: Resources) -> Capacity:
        """Return the free GPUs for `resources`, or the reason for which they are not known."""
        key = document_digest(resources.model_dump(mode="json"))
        with self._lock:
            asked_at, answer = self._answers.get(key, (float("-inf"), None))
            if answer is None or time.monotonic() - asked_at >= FRESH_S:
                answer = _ask(resources)
                if len(self._answers) >= KEPT_MAX:
                    self._answers.clear()
                self._answers[key] = time.monotonic(), answer
            return answer


def _ask(resources: Resources) -> Capacity:
    where = f"partition {resources.partition}" if resources.partition else resources.executor
    try:
        free = executor_for(resources.executor).capacity(resources, is_urgent=False)
    except (HoldfastError, OSError) as error:
        reason = plain_line(f"{where} did not answer: {error}")[:REASON_CHARACTERS_MAX]
        return Capacity(gpus_free=None, where=where, problem=reason)
    return Capacity(gpus_free=free, where=where, problem=None)


def find_full_roots(sizes: Mapping[Path, int]) -> list[tuple[Path, Finding]]:
    """Return the roots that are nearly full; a file system is reported once.

    `sizes` maps each root to the bytes of one checkpoint of each of its live runs.
    """
    found, seen = [], set()
    for root, size in sizes.items():
        try:
            device, facts = os.stat(root).st_dev, os.statvfs(root)
        except OSError:
            # The health of the server says which roots cannot be read.
            continue
        needed = sum(bytes_ for other, bytes_ in sizes.items() if _is_on(other, device))
        problem = next(_problems(root, facts, max(size, needed)), None)
        if problem is not None and device not in seen:
            seen.add(device)
            found.append((root, problem))
    return found


def _is_on(root: Path, device: int) -> bool:
    try:
        return os.stat(root).st_dev == device
    except OSError:
        return False


def _problems(root: Path, facts: os.statvfs_result, needed: int) -> Iterator[Finding]:
    free = facts.f_bavail * facts.f_frsize
    share = facts.f_bavail / facts.f_blocks if facts.f_blocks else 1.0
    action = "Storage shows what a prune would delete"
    where = f"{root} has {free / _GIB:.3g} GiB left, {share * 100:.2g} % of its file system"
    if free < needed:
        text = f"{where}; the next checkpoints of its live runs need {needed / _GIB:.3g} GiB"
        yield finding("storage_full", "bad", text, None, action)
    elif share < FREE_SHARE_MIN or free < CHECKPOINTS_MIN * needed:
        text = where
        if needed:
            text += f", which is {free // needed} checkpoints of each live run"
        yield finding("storage_full", "warn", text, None, action)
    if facts.f_files and facts.f_favail / facts.f_files < FREE_SHARE_MIN:
        text = f"{root} has {facts.f_favail} of {facts.f_files} inodes left"
        yield finding("storage_full", "warn", text, None, action)
