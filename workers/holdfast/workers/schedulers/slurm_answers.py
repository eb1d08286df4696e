"""Answers of Slurm that all processes of this user on this host share.

A controller serves thousands of users, and each supervisor would ask it about its own job several
times a minute. So one of them asks about all jobs, and the others read its answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import to_json, write_bytes
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.paths import holdfast_home
from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import (
    ForeignFileError,
    SchedulerError,
    SchedulerUnavailableError,
    SpecError,
)
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm_client import CALL_TIMEOUT_S, JobLine, call, parse_time

# With these, a host asks about nine times a minute, however many runs it supervises. Growth under a
# QOS with limits adds three.
JOBS_AGE_S: Final = 8.0
CAPACITY_AGE_S: Final = 60.0
# The controller answers questions for at most this share of the time.
LOAD_MAX: Final = 0.1
AGE_S_MAX: Final = 60.0
LOCK_S: Final = CALL_TIMEOUT_S + 5.0
_CLUSTER: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
_FORMAT: Final = "%i|%T|%r|%N|%S|%e|%B|%j"


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """One answer. `asked_at` is Unix seconds. `problem` is the message of a failed command."""

    asked_at: float
    took_s: float
    output: str = ""
    problem: str = ""
    is_refusal: bool = False

    def is_fresh(self, age_s: float, since: float) -> bool:
        """Return True if the answer may still be used. A slow controller is asked less often."""
        now = time.time()
        is_too_early = self.asked_at < since <= now
        allowed_s = min(max(0.0 if is_too_early else age_s, self.took_s / LOAD_MAX), AGE_S_MAX)
        return 0.0 <= now - self.asked_at <= allowed_s

    def read(self) -> str:
        if self.problem:
            raise (SchedulerError if self.is_refusal else SchedulerUnavailableError)(self.problem)
        return self.output


def shared_call(
    arguments: Sequence[str],
    timeout_s: float = CALL_TIMEOUT_S,
    *,
    age_s: float,
    since: float = 0.0,
) -> str:
    """Return the output of a Slurm command, or an earlier one that is at most `age_s` seconds old.

    From the time `since` (Unix seconds) on, one from before it is used only if the controller is
    slow. Raises like `slurm_client.call`. An error is shared too.
    """
    try:
        place = _place_of(arguments)
        if (known := _read(place)) and known.is_fresh(age_s, since):
            return known.read()
        with _locked(place):
            # Another process may have asked while this one waited.
            known = _read(place)
            if known is None or not known.is_fresh(age_s, since):
                known = _ask(arguments, timeout_s)
                content = to_json(asdict(known))
                write_bytes(place, content, mode=0o600, below=holdfast_home())
    except (OSError, ForeignFileError, SpecError):
        # Without a usable home there is nothing to share.
        return call(arguments, timeout_s)
    return known.read()


def listed_jobs(age_s: float = JOBS_AGE_S, since: float = 0.0) -> dict[str, JobLine]:
    """Return this user's jobs that have not ended, by id. For `since`, see `shared_call`.

    Raises like `slurm_client.call`.
    """
    command = ["squeue", "-h", "-a", "-u", str(os.getuid()), "-o", _FORMAT]
    rows = [
        line.split("|", 7) for line in shared_call(command, age_s=age_s, since=since).splitlines()
    ]
    return {row[0]: _job(row) for row in rows if len(row) == 8}


def cluster_name() -> str | None:
    """Return the cluster that the Slurm commands of this process ask; None without an answer."""
    asked = (shutil.which("scontrol"), *map(os.environ.get, _CLUSTER))
    with contextlib.suppress(SchedulerError):
        return _cluster_name(asked) or None
    return None


@lru_cache
def _cluster_name(_: tuple[str | None, ...]) -> str:
    ask = partial(shared_call, age_s=CAPACITY_AGE_S)
    return slurm_client.settings(ask=ask).get("ClusterName", "")


def _job(row: Sequence[str]) -> JobLine:
    job, state, reason, nodes, start, end, batch_host, name = row
    fields = {"BatchHost": "" if batch_host == "n/a" else batch_host}
    return JobLine(job, name, state, reason, nodes, parse_time(start), parse_time(end), fields)


def _place_of(arguments: Sequence[str]) -> Path:
    """Return the file of a command's answer: the same for all processes that would get the same."""
    asked = [*arguments, shutil.which(arguments[0]) or "", *map(os.environ.get, _CLUSTER)]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return holdfast_home() / f"slurm-{os.geteuid()}" / f"{socket.gethostname()}-{digest}.json"


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process ask at a time."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = place.with_suffix(".lock")
    with locked(lock, LOCK_S, below=holdfast_home(), owner_only=True) as is_locked:
        if not is_locked:
            raise SchedulerUnavailableError(
                f"another process has asked Slurm for {LOCK_S:.0f} s and has no answer yet"
            )
        yield


def _ask(arguments: Sequence[str], timeout_s: float) -> _Answer:
    began, asked_at = time.monotonic(), time.time()
    output = problem = ""
    is_refusal = False
    try:
        output = call(arguments, timeout_s)
    except SchedulerError as error:
        problem, is_refusal = str(error), not isinstance(error, SchedulerUnavailableError)
    return _Answer(
        asked_at=asked_at,
        took_s=time.monotonic() - began,
        output=output,
        problem=problem,
        is_refusal=is_refusal,
    )


def _read(place: Path) -> _Answer | None:
    """Return the recorded answer; None if there is none, or none that this user wrote."""
    try:
        with os.fdopen(open_regular(place), "rb") as stream:
            if os.fstat(stream.fileno()).st_uid != os.geteuid():
                return None
            return _Answer(**json.load(stream))
    except (OSError, ForeignFileError, ValueError, TypeError):
        return None
