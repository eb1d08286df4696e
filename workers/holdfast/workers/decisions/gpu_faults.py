"""Judge what a node's GPUs report during training. Pure functions of two readings.

Only changes count. A counter that was high before the launch says nothing about it, because jobs of
others and years of use have raised it. Which Xid errors are fatal is taken from NVIDIA's "Xid
Catalog" (Analyzing Xid Errors): those whose immediate action is RESET_GPU, RESTART_BM,
WORKFLOW_XID_48 or WORKFLOW_NVLINK_ERR. The errors whose action is RESTART_APP or IGNORE come from
programs, or are contained. See decision 103.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.plain_text import counted
from holdfast.workers.nodes.gpus import GpuBeat

# The catalog's names of the fatal errors.
FATAL_XIDS: Final[Mapping[int, str]] = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "memory remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
}
# The limits count within this time.
WINDOW_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class GpuFinding:
    """What is wrong with GPU number `gpu` of a node. `kind` is the same for the same problem.

    A fault makes the ranks of the GPU fail. Other findings only make them slower.
    """

    gpu: int
    kind: str
    text: str
    is_fault: bool


@dataclass(frozen=True, kw_only=True)
class GpuLimits:
    """How many seconds of throttling, and how many errors of links, are too many; 0: no limit."""

    throttled_s: float = 0.0
    link_errors: int = 0


def find_faults(before: Sequence[GpuBeat], now: Sequence[GpuBeat]) -> list[GpuFinding]:
    """Return the faults of GPUs since the reading `before`, of the same driver."""
    return [one for old, new in _pairs(before, now) for one in _faults(old, new)]


def find_wear(
    before: Sequence[GpuBeat], now: Sequence[GpuBeat], limits: GpuLimits
) -> list[GpuFinding]:
    """Return what slows GPUs down beyond the limits. `before` is at most `WINDOW_S` older."""
    return [one for old, new in _pairs(before, now) for one in _wear(old, new, limits)]


def _pairs(before: Sequence[GpuBeat], now: Sequence[GpuBeat]) -> Iterator[tuple[GpuBeat, GpuBeat]]:
    known = {beat.uuid: beat for beat in before if beat.uuid}
    for beat in now:
        if (old := known.get(beat.uuid)) is not None:
            yield old, beat


def _faults(old: GpuBeat, new: GpuBeat) -> Iterator[GpuFinding]:
    def fault(kind: str, text: str) -> GpuFinding:
        return GpuFinding(gpu=new.index, kind=kind, text=text, is_fault=True)

    fresh = new.xids_seen - old.xids_seen
    for xid in new.xids[-fresh:] if fresh > 0 else ():
        if xid in FATAL_XIDS:
            yield fault(f"xid-{xid}", f"GPU {new.index}: Xid {xid}: {FATAL_XIDS[xid]}")
    if rise := _rise(old.ecc_uncorrected, new.ecc_uncorrected):
        errors = counted(rise, "new uncorrectable memory error")
        yield fault("ecc", f"GPU {new.index}: {errors} (ECC)")
    if new.remap_failed and old.remap_failed is False:
        yield fault("remap", f"GPU {new.index}: a row of its memory could not be remapped")
    if new.is_lost and not old.is_lost:
        yield fault("lost", f"GPU {new.index}: the driver has lost it")
    if down := _rise(old.nvlinks_down, new.nvlinks_down):
        links = counted(down, "NVLink")
        yield fault("nvlink-down", f"GPU {new.index}: {links} went down")


def _wear(old: GpuBeat, new: GpuBeat, limits: GpuLimits) -> Iterator[GpuFinding]:
    def wear(kind: str, text: str) -> GpuFinding:
        text = f"GPU {new.index}: {text} within {WINDOW_S:.0f} s"
        return GpuFinding(gpu=new.index, kind=kind, text=text, is_fault=False)

    hot_s = _rise(old.throttled_s, new.throttled_s)
    if 0 < limits.throttled_s <= hot_s:
        at = f", now at {new.temperature_c} °C" if new.temperature_c is not None else ""
        clock = f" and {new.clock_mhz} of {new.clock_max_mhz} MHz" if new.clock_max_mhz else ""
        yield wear("heat", f"heat lowered its clock for {hot_s:.0f} s{at}{clock},")
    for kind, name, rise in (
        ("nvlink", "NVLink error", _rise(old.nvlink_errors, new.nvlink_errors)),
        ("pcie", "PCIe replay", _rise(old.pcie_replays, new.pcie_replays)),
    ):
        if 0 < limits.link_errors <= rise:
            yield wear(kind, counted(int(rise), f"new {name}"))


def _rise(old: float | None, new: float | None) -> Any:
    """Return by how much a counter has risen; 0 if it is unknown, or was reset."""
    return max(0, new - old) if old is not None and new is not None else 0


def hosts_at_fault(found: Mapping[str, Sequence[GpuFinding]], nodes: int) -> tuple[str, ...]:
    """Return the hosts with findings, in order; none if the same is found on most of the nodes.

    A driver or a cooling that fails everywhere is no fault of a node. With one node, nothing can be
    compared.
    """
    hosts = []
    for host, findings in found.items():
        for kind in {one.kind for one in findings}:
            alike = sum(any(one.kind == kind for one in others) for others in found.values())
            if nodes == 1 or alike * 2 <= nodes:
                hosts.append(host)
                break
    return tuple(hosts)
