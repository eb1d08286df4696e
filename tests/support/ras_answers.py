"""Answers of NCCL's RAS, written line by line as NCCL 2.24, 2.27 and 2.29 print them.

With `verbose status`, the text names those ranks of which less than half have the same count, and
any rank that is alone with its count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


@dataclass(frozen=True)
class PlayedRank:
    """A rank of a communicator, its process, and how often it has called each operation."""

    rank: int
    pid: int
    host: str
    calls: dict[str, int] = field(default_factory=dict)
    is_dead: bool = False
    is_silent: bool = False

    @property
    def is_missing(self) -> bool:
        return self.is_dead or self.is_silent

    @property
    def managed(self) -> str:
        return f"GPU {self.rank % 2} managed by process {self.pid} on node {self.host}"


Communicators = dict[int, Sequence[PlayedRank]]


def in_json(communicators: Communicators, *, is_late: bool = False) -> bytes:
    """The answer of NCCL 2.28.7 and newer, after `set format json`.

    With `is_late`, RAS waited for processes that did not answer.
    """
    data = {
        "nccl_version": "2.29.2",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-29 20:11:12",
        "communicators_count": len(communicators),
        "communicators": [_communicator(*one) for one in communicators.items()],
        "ras": {"collection_time_sec": 0.002, "timeouts_count": 2 * is_late},
    }
    return f"{json.dumps(data, indent=2)}\n".encode()


def _communicator(number: int, ranks: Sequence[PlayedRank]) -> dict[str, object]:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False}
    status |= {"destroy_flag": False, "abort_flag": False}
    there, missing = _split(ranks)
    return {
        "hash": f"0x{number:x}",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(ranks),
        "ranks_count": len(there),
        "missing_ranks_count": len(missing),
        "ranks": [
            {
                **_place(one),
                "status": status,
                "collective_counts": {name: one.calls.get(name, 0) for name in OPERATIONS},
            }
            for one in there
        ],
        "missing_ranks": [
            {**_place(one), "status": {"unresponsive": True, "considered_dead": one.is_dead}}
            for one in missing
        ],
    }


def _split(ranks: Sequence[PlayedRank]) -> tuple[list[PlayedRank], list[PlayedRank]]:
    return [r for r in ranks if not r.is_missing], [r for r in ranks if r.is_missing]


def _place(one: PlayedRank) -> dict[str, object]:
    gpu = one.rank % 2
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "cuda_dev": gpu,
        "nvml_dev": gpu,
    }


def in_text(
    communicators: Communicators, version: str = "2.27.3", *, is_late: bool = False
) -> bytes:
    """The answer of older versions. Those before 2.26 count all operations together."""
    every = {one.pid: one for ranks in communicators.values() for one in ranks}
    hosts = {one.host for one in every.values()}
    lines = [
        f"NCCL version {version} compiled with CUDA 12.9",
        "CUDA runtime version 12090, driver version 12080",
        "",
        "Job summary",
        "===========",
        "",
        "  Nodes  Processes         GPUs  Processes     GPUs",
        "(total)   per node  per process    (total)  (total)",
        f"{len(hosts):7}  {2:9}  {1:11}  {len(every):9}  {len(every):7}",
        "",
        "Communicators... (2.05s)",
        "=============",
        "",
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
        "    #  in group  per comm  per node  per comm  in group",
    ]
    for group, ranks in enumerate(communicators.values()):
        errors = ["INCOMPLETE"] if any(one.is_missing for one in ranks) else []
        errors += ["MISMATCH"] if _mismatch("", ranks, version) else []
        there = sum(not one.is_missing for one in ranks)
        lines.append(
            f"{group:5}  {1:8}  {len(hosts):8}  {2:>8}  {len(ranks):8}  {there:8}  "
            f"{'RUNNING':>8}  {','.join(errors) or 'OK':>6}"
        )
    lines += ["", "Errors", "======", ""]
    silent = [one for one in every.values() if one.is_silent]
    dead = [one for one in every.values() if one.is_dead]
    if silent:
        lines += ["INCOMPLETE", f"  Missing communicator data from {_count(silent, 'job process')}"]
        lines += [*_processes(silent), ""]
    if dead:
        are = "process is" if len(dead) == 1 else "processes are"
        said = f"  {len(dead)} job {are} considered dead (unreachable via the RAS network)"
        lines += ["DEAD", said, *_processes(dead), ""]
    for group, (number, ranks) in enumerate(communicators.items()):
        lines += _incomplete(f"#{group}-0 ({number:016x})", ranks, version)
    lines += ["Warnings", "========", ""]
    if is_late:
        said = "  Encountered 2 communication timeouts while gathering communicator data"
        lines += ["TIMEOUT", said, ""]
    for group, (number, ranks) in enumerate(communicators.items()):
        lines += _mismatch(f"#{group}-0 ({number:016x})", ranks, version)
    return ("\n".join(lines) + "\n").encode()


def _count(found: Sequence[object], name: str) -> str:
    more = ("es" if name.endswith("s") else "s") if len(found) > 1 else ""
    return f"{len(found)} {name}{more}"


def _processes(found: Iterable[PlayedRank]) -> list[str]:
    return [f"  Process {one.pid} on node {one.host} managing GPU {one.rank % 2}" for one in found]


def _incomplete(about: str, ranks: Sequence[PlayedRank], version: str) -> list[str]:
    missing = [one for one in ranks if one.is_missing]
    if not missing:
        return []
    said = f"  Missing communicator data from {_count(missing, 'rank')}"
    if version < "2.26":
        numbers = ",".join(str(one.rank) for one in missing)
        named = [f"  The missing {'ranks' if len(missing) > 1 else 'rank'}: {numbers}"]
    else:
        named = [f"  Rank {one.rank} -- {one.managed}" for one in missing]
    return [f"{about} INCOMPLETE", said, *named, ""]


def _mismatch(about: str, ranks: Sequence[PlayedRank], version: str) -> list[str]:
    lines = []
    for operation in ("collective",) if version < "2.26" else OPERATIONS:
        by_calls: dict[int, list[PlayedRank]] = defaultdict(list)
        for one in ranks:
            if not one.is_missing:
                together = sum(one.calls.values())
                by_calls[together if version < "2.26" else one.calls.get(operation, 0)].append(one)
        if len(by_calls) < 2:
            continue
        lines.append(f"  Communicator ranks have different {operation} operation counts")
        for calls, those in sorted(by_calls.items(), key=lambda item: (-len(item[1]), -item[0])):
            launched = f"launched up to operation {calls}"
            if version >= "2.26" and not calls:
                launched = "not launched any operations"
            if len(those) == 1:
                lines.append(f"  Rank {those[0].rank} has {launched} -- {those[0].managed}")
                continue
            lines.append(f"  {len(those)} ranks have {launched}")
            if len(those) < len(ranks) * 0.5:
                lines += [f"  Rank {one.rank} -- {one.managed}" for one in those]
        lines.append("")
    return [f"{about} MISMATCH", *lines] if lines else []
