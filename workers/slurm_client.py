"""Asking Slurm: every call bounded, every answer parsed here. A silence is never an absence."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError

CALL_TIMEOUT_S: Final = 20.0
SACCT_FIELDS: Final = ("JobIDRaw", "JobName", "State", "Start", "End", "NodeList", "ExitCode")
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=")
_GPUS = re.compile(r"gpu(?::[^:(,]+)?:(\d+)")
_NO_ACCOUNTING = ("accounting storage is disabled", "not running a supported accounting_storage")
_NO_JOB = ("invalid job id", "no job", "not found")


@dataclass(frozen=True)
class JobLine:
    """One job as squeue, scontrol or sacct showed it. Times are Unix seconds."""

    job_id: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    fields: Mapping[str, str] | None = None


def call(arguments: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> str:
    """Standard output of a Slurm command.

    Raises `SchedulerUnavailableError` when it does not exist, is late, or cannot reach the
    controller, and `SchedulerError` with its own words when it refused.
    """
    try:
        done = subprocess.run(
            list(arguments), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise SchedulerUnavailableError(
            f"{arguments[0]}: no such command on this machine; run this on a host of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailableError(
            f"{arguments[0]} did not answer within {timeout_s:.0f} s; the job's state is unknown"
        ) from None
    if done.returncode == 0:
        return done.stdout
    words = " ".join((done.stderr or done.stdout).split())[:1000]
    if is_refusal(words):
        raise SchedulerError(f"{' '.join(arguments)}: {words}")
    raise SchedulerUnavailableError(f"{arguments[0]} cannot ask Slurm: {words}")


def is_refusal(words: str) -> bool:
    """True for an answer of the controller, False where it may not have been reached."""
    unreachable = (
        "unable to contact",
        "socket timed out",
        "connection refused",
        "configuration source",
        "connection timed out",
        "slurm_persist_conn_open",
        "zero bytes were transmitted",
        "communication connection failure",
        "slurm backup controller",
        "problem talking to the database",
        "munge",
        "protocol authentication error",
    )
    return not any(sign in words.lower() for sign in unreachable)


def queued_jobs(name: str) -> list[JobLine]:
    """Jobs called `name` that the controller still remembers, ended ones too, newest last."""
    out = call(["squeue", "-h", "-t", "all", f"--name={name}", "-o", "%i|%j|%T|%r|%N|%S|%e"])
    rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 6]
    return [JobLine(r[0], r[1], r[2], r[3], r[4], parse_time(r[5]), parse_time(r[6])) for r in rows]


def recorded_jobs(*, name: str = "", job_id: str = "", since: float = 0.0) -> list[JobLine]:
    """Jobs that the accounting database knows by name or number, oldest first.

    Empty where the site keeps no accounts. `since` is Unix seconds.
    """
    chosen = [f"--jobs={job_id}"] if job_id else [f"--name={name}"]
    start = datetime.fromtimestamp(max(since - 24 * 3600.0, 0.0)).strftime("%Y-%m-%dT%H:%M:%S")
    command = ["sacct", "-n", "-P", "-X", "-D", f"-S{start}", *chosen, "-o", ",".join(SACCT_FIELDS)]
    try:
        out = call(command)
    except SchedulerError as error:
        if any(sign in str(error).lower() for sign in _NO_ACCOUNTING):
            return []
        raise
    rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 6]
    return [JobLine(r[0], r[1], r[2], "", r[5], parse_time(r[3]), parse_time(r[4])) for r in rows]


def show_job(job_id: str, timeout_s: float = CALL_TIMEOUT_S) -> JobLine | None:
    """The job as the controller holds it, or None when it has forgotten it."""
    try:
        out = call(["scontrol", "-o", "show", "job", job_id], timeout_s)
    except SchedulerUnavailableError:
        raise
    except SchedulerError as error:
        if any(sign in str(error).lower() for sign in _NO_JOB):
            return None
        raise
    fields = parse_fields(out)
    if "JobState" not in fields:
        return None
    return JobLine(
        fields.get("JobId", job_id),
        fields.get("JobName", ""),
        fields["JobState"],
        fields.get("Reason", ""),
        fields.get("NodeList", ""),
        parse_time(fields.get("StartTime", "")),
        parse_time(fields.get("EndTime", "")),
        fields,
    )


def show_nodes() -> list[dict[str, str]]:
    """Every node's fields as `scontrol -d show node` prints them."""
    out = call(["scontrol", "-o", "-d", "show", "node"])
    return [parse_fields(line) for line in out.splitlines() if line.startswith("NodeName=")]


def partitions(timeout_s: float = CALL_TIMEOUT_S) -> list[dict[str, str]]:
    """Every partition's fields as `scontrol show partition` prints them."""
    out = call(["scontrol", "-o", "show", "partition"], timeout_s)
    return [parse_fields(line) for line in out.splitlines() if line.startswith("PartitionName=")]


def preemption_type(timeout_s: float = CALL_TIMEOUT_S) -> str:
    """By what the site preempts, such as `preempt/partition_prio`; empty when it does not say."""
    lines = call(["scontrol", "show", "config"], timeout_s).splitlines()
    found = [line.partition("=")[2] for line in lines if line.startswith("PreemptType ")]
    return found[0].strip() if found else ""


def qualities(timeout_s: float = CALL_TIMEOUT_S) -> dict[str, tuple[str, str]]:
    """Each QOS's preemption grace and the QOSs that it preempts, as the accounting writes them."""
    command = ["sacctmgr", "-n", "-P", "show", "qos", "format=Name,GraceTime,Preempt"]
    rows = [line.split("|") for line in call(command, timeout_s).splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def parse_fields(text: str) -> dict[str, str]:
    """`A=1 B=two words C=3` as a dict; a value runs up to the next `name=`."""
    marks = list(_FIELD.finditer(text.strip()))
    ends = [mark.start() for mark in marks[1:]] + [len(text.strip())]
    pairs = zip(marks, ends, strict=True)
    return {mark[1]: text.strip()[mark.end() : end].strip() for mark, end in pairs}


def parse_time(text: str) -> float | None:
    """Unix seconds of Slurm's local time, None for `Unknown`, `N/A`, `None` and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_minutes(text: str) -> float | None:
    """Minutes of a Slurm duration (`1-02:03:04`, `30:00`), None for `UNLIMITED` and the like."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(p.isdigit() for p in parts) or (days and not days.isdigit()):
        return None
    numbers = [int(p) for p in parts]
    if days:
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:
        return float(numbers[0])
    else:
        numbers = [0] * (3 - len(numbers)) + numbers
    hours, minutes, seconds = numbers[:3]
    return (int(days or 0) * 24 + hours) * 60 + minutes + seconds / 60


def gpus_of(gres: str) -> int:
    """GPUs in a GRES string such as `gpu:a100:4(S:0-1),shard:8`; 0 when there are none."""
    return sum(int(count) for count in _GPUS.findall(gres))


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Host names in Slurm's short form: `n[1-3,7],m2` is n1, n2, n3, n7, m2."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", node_list):
        hosts += _expand(part)
    return tuple(host for host in hosts if host and not host.startswith("("))


def _expand(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if not match:
        return [part]
    names = []
    for span in match[2].split(","):
        low, _, high = span.partition("-")
        last = int(high or low)
        numbers = [f"{n:0{len(low)}d}" for n in range(int(low), last + 1)]
        names += [match[1] + number + rest for number in numbers for rest in _expand(match[3])]
    return names


def now() -> float:
    """Unix seconds; one place, so that what waits for Slurm's clock says so."""
    return time.time()
