"""The GPUs' errors during training: each node compares its counters, and node 0 judges them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.spec.sections import Health
from holdfast.contracts.states import Cause
from holdfast.workers.decisions import gpu_faults
from holdfast.workers.decisions.causes import STATE_OF_CAUSE, Ending
from holdfast.workers.nodes.gpus import GpuBeat

CHECK: Final = "gpus"
KEPT_EVERY_S: Final = 30.0
FINDINGS_MAX: Final = 32
# Causes that a fault of a GPU explains. All others are the program's own, or certain.
_EXPLAINED: Final = frozenset({Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.HANG})
Beats = tuple[GpuBeat, ...]


class GpuHealth:
    """Finds what is wrong with the GPUs of this node since the launch began."""

    def __init__(self, beats: Callable[[], Beats], health: Health) -> None:
        self._beats, self._is_off = beats, health.gpus == "off"
        self._limits = gpu_faults.GpuLimits(
            throttled_s=health.throttled_s_max, link_errors=health.link_errors_max
        )
        self.begin()

    def begin(self) -> None:
        """Forget the findings, because a new launch starts."""
        self._found: dict[tuple[int, str], gpu_faults.GpuFinding] = {}
        self._first = self._last = self._beats()
        self._kept: deque[tuple[float, Beats]] = deque()

    def findings(self) -> tuple[gpu_faults.GpuFinding, ...]:
        """Return what was found in this launch."""
        beats, now = self._beats(), time.monotonic()
        if self._is_off or beats is self._last:
            return tuple(self._found.values())
        # The first reading of the driver may come after the launch has begun.
        self._first, self._last = self._first or beats, beats
        if not self._kept or now - self._kept[-1][0] >= KEPT_EVERY_S:
            self._kept.append((now, beats))
        while now - self._kept[0][0] > gpu_faults.WINDOW_S:
            self._kept.popleft()
        wear = gpu_faults.find_wear(self._kept[0][1], beats, self._limits)
        for one in (*gpu_faults.find_faults(self._first, beats), *wear):
            if len(self._found) < FINDINGS_MAX:
                self._found.setdefault((one.gpu, one.kind), one)
        return tuple(self._found.values())


class HasFindings(Protocol):
    """A report of a node."""

    @property
    def gpus(self) -> tuple[gpu_faults.GpuFinding, ...]: ...


class GpuJudge:
    """Node 0's side: it journals the findings of all nodes. `hosts` are to be excluded."""

    def __init__(self, health: Health, attempt: int, journal: JournalWriter) -> None:
        self._excludes = health.gpus == "exclude"
        self._attempt, self._journal = attempt, journal
        self._found: dict[str, list[gpu_faults.GpuFinding]] = {}
        self._said: set[tuple[str, int, str]] = set()
        self.hosts: tuple[str, ...] = ()

    def begin(self) -> None:
        """Forget the findings of the last launch, because a new one starts."""
        self._found = {}

    def look(self, reports: Mapping[str, HasFindings]) -> None:
        """Take the newest reports, by host."""
        for host, report in reports.items():
            if not report.gpus:
                continue
            self._found[host] = list(report.gpus)
            for one in report.gpus:
                if (key := (host, one.gpu, one.kind)) not in self._said:
                    self._said.add(key)
                    self._journal.append(
                        EventKind.NODE_UNHEALTHY,
                        attempt=self._attempt,
                        host=host,
                        check=CHECK,
                        detail=one.text,
                    )
        if self._excludes and self._found:
            bad = gpu_faults.hosts_at_fault(self._found, len(reports))
            self.hosts = tuple(dict.fromkeys((*self.hosts, *bad)))

    def explain(self, ending: Ending, nodes: int) -> Ending:
        """Return how a launch of `nodes` nodes ended, with the faults of GPUs as its cause."""
        if not self._excludes or ending.cause not in _EXPLAINED:
            return ending
        faults = {
            host: [one for one in found if one.is_fault] for host, found in self._found.items()
        }
        evidence = [
            f"{host} is unhealthy: {CHECK}: {one.text}"
            for host in gpu_faults.hosts_at_fault(faults, nodes)
            for one in faults[host]
        ]
        if not evidence:
            return ending
        cause = Cause.NODE_FAILURE
        return replace(
            ending,
            state=STATE_OF_CAUSE[cause],
            cause=cause,
            evidence=(*evidence, *ending.evidence),
        )
