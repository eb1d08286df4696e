"""Query Slurm. Every call is bounded in time. No answer never counts as "no such job"."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from holdfast.contracts import errors
from holdfast.contracts.disk import durable, file_locks, reading
from holdfast.contracts.disk.paths import holdfast_home
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.states import AttemptState

# The mapping of Slurm's job states to attempt states.

_S = AttemptState
# Every job state and flag that squeue, sacct or scontrol prints, from Slurm 20.11 to 25.05.
SLURM_STATES: Final[dict[str, AttemptState]] = {
    "BOOT_FAIL": _S.NODE_FAILED,
    "CANCELLED": _S.CANCELLED,
    "COMPLETED": _S.COMPLETED,
    "COMPLETING": _S.STOPPING,
    "CONFIGURING": _S.PENDING,
    "DEADLINE": _S.TIMED_OUT,
    "EXPEDITING": _S.PENDING,
    "FAILED": _S.FAILED,
    "LAUNCH_FAILED": _S.FAILED,
    "NODE_FAIL": _S.NODE_FAILED,
    "OUT_OF_MEMORY": _S.FAILED,
    "PENDING": _S.PENDING,
    "POWER_UP_NODE": _S.PENDING,
    "PREEMPTED": _S.PREEMPTED,
    "RECONFIG_FAIL": _S.FAILED,
    "REQUEUED": _S.PENDING,
    "REQUEUE_FED": _S.PENDING,
    "REQUEUE_HOLD": _S.PENDING,
    "RESIZING": _S.RUNNING,
    "RESV_DEL_HOLD": _S.PENDING,
    "REVOKED": _S.LOST,
    "RUNNING": _S.RUNNING,
    "SIGNALING": _S.RUNNING,
    "SPECIAL_EXIT": _S.PENDING,
    "STAGE_OUT": _S.STOPPING,
    "STOPPED": _S.RUNNING,
    "SUSPENDED": _S.RUNNING,
    "TIMEOUT": _S.TIMED_OUT,
    "UPDATE_DB": _S.STOPPING,
}


def translate(state: str) -> AttemptState | None:
    """Return the attempt state for a Slurm state, or None for a state of no known version.

    Slurm may add to its states: `CANCELLED by 1000`, `NODE_FAIL+`, a trailing `*` for flags.
    """
    base = bare_state(state)
    return SLURM_STATES.get(base)


def bare_state(state: str) -> str:
    """Return Slurm's state without additions: `CANCELLED by 0` is `CANCELLED`."""
    return state.split(" ")[0].split(",")[0].rstrip("+*") if state else ""


CALL_TIMEOUT_S: Final = 20.0
# For an answer without which Holdfast can continue.
ANSWER_TIMEOUT_S: Final = 5.0
# Slurm's default of SlurmdTimeout.
NOTICE_S: Final = 300.0
# How often a command that a signal killed is repeated.
KILLED_MAX: Final = 3
SACCT_FIELDS: Final = ("JobIDRaw", "JobName", "State", "Start", "End", "NodeList", "ExitCode")
_COMMANDS: Final = "SLURM SLURMD SBATCH SRUN SALLOC SQUEUE SACCT SINFO SCONTROL SCANCEL"
_DEFAULTS: Final = tuple(f"{name}_" for name in _COMMANDS.split())
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY"})
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=")
# Also of a task of an array and of a component of a heterogeneous job.
_JOB_ID: Final = re.compile(r"[1-9][0-9]{0,18}(?:[_+][0-9]{1,9})?")
_NO_ACCOUNTING = ("accounting storage is disabled", "not running a supported accounting_storage")
_NO_JOB = ("invalid job id", "no job", "not found")
# The versions of Slurm on which the tests of this version of Holdfast ran.
TESTED: Final = ("20.11", "22.05", "24.11", "26.05")


@dataclass(frozen=True)
class JobLine:
    """One job as squeue, scontrol or sacct prints it. Times are Unix seconds."""

    job_id: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    fields: Mapping[str, str] | None = None


def call(arguments: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> str:
    """Return the standard output of a Slurm command.

    Raises `SchedulerUnavailableError` if the command does not exist, times out or cannot reach the
    controller. Raises `SchedulerError` with Slurm's message if the controller refused it.
    """
    done = _run(arguments, timeout_s)
    for _ in range(KILLED_MAX):
        # Slurm signals every process of a job step, so also a command that an agent has started.
        if done.returncode >= 0:
            break
        done = _run(arguments, timeout_s)
    if done.returncode == 0:
        return done.stdout
    message = " ".join((done.stderr or done.stdout).split())[:1000]
    if done.returncode < 0:
        message = f"the command was killed by signal {-done.returncode}; {message}"
    elif is_refusal(message):
        raise errors.SchedulerError(f"{' '.join(arguments)}: {message}")
    raise errors.SchedulerUnavailableError(f"{arguments[0]} cannot reach Slurm: {message}")


def _run(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command, which prints and takes times in UTC.

    A local time is ambiguous in the hour that a clock change repeats. Raises
    `SchedulerUnavailableError` if the command is missing or too slow.
    """
    try:
        return subprocess.run(
            list(arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**{k: v for k, v in os.environ.items() if not is_users_default(k)}, "TZ": "UTC"},
        )
    except FileNotFoundError:
        raise errors.SchedulerUnavailableError(
            f"{arguments[0]}: no such command on this machine; run this on a host of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise errors.SchedulerUnavailableError(
            f"{arguments[0]} did not answer within {timeout_s:.0f} s; the job's state is unknown"
        ) from None


Ask = Callable[[Sequence[str]], str]
"""Runs a Slurm command and returns its output, like `call`."""


def call_briefly(arguments: Sequence[str]) -> str:
    """Do what `call` does, but wait for `ANSWER_TIMEOUT_S` only."""
    return call(arguments, timeout_s=ANSWER_TIMEOUT_S)


def is_users_default(name: str) -> bool:
    """Return True for a variable that changes Slurm's output or its jobs.

    `SLURM_TIME_FORMAT` and `SQUEUE_FORMAT` change the output that is parsed here. If this process
    is in an allocation, its variables would become those of a submitted job. The variables that
    locate the cluster and authenticate the user stay.
    """
    return name.startswith(_DEFAULTS) and name not in _KEPT


# Messages of Slurm and the system which mean that no answer to the request arrived.
_NO_ANSWER = (
    "unable to contact",
    "socket timed out",
    "timed out",
    "connection refused",
    "connection reset",
    "broken pipe",
    "no route to host",
    "network is unreachable",
    "configuration source",
    "slurm_persist_conn_open",
    "zero bytes were transmitted",
    "communication connection failure",
    "communication shutdown failure",
    "message send failure",
    "message receive failure",
    "unexpected message received",
    "insane message length",
    "header lengths are longer",
    "slurm backup controller",
    "controller is in standby",
    "problem talking to the database",
    "munge",
    "protocol authentication error",
    "protocol version has changed",
)
# Refusals that the same request always meets. All others may pass: limits of an account or a QOS
# count other jobs, and partitions, licences and reservations become available again.
_FINAL = (
    "invalid partition name",
    "invalid account",
    "invalid qos",
    "invalid feature",
    "invalid generic resource",
    "invalid gres",
    "invalid wckey",
    "invalid user id",
    "invalid group",
    "invalid node name",
    "invalid node list",
    "invalid working directory",
    "invalid trackable resource",
    "requested time limit is invalid",
    "requested node configuration is not available",
    "node count specification invalid",
    "cpu count specification invalid",
    "cpu count per node can not be satisfied",
    "memory specification can not be satisfied",
    "more processors requested than permitted",
    "access/permission denied",
    "permission denied",
    "user's group not permitted",
    "not permitted to use this partition",
    "pathname of a file, directory",
    "unrecognized option",
    "invalid option",
    "unable to open file",
)


def is_refusal(message: str) -> bool:
    """Return True for an answer of the controller, False if it may not have been reached."""
    return not any(sign in message.lower() for sign in _NO_ANSWER)


def may_pass(message: str) -> bool:
    """Return True if the scheduler may later accept the request that it refused with `message`."""
    return not any(sign in message.lower() for sign in _FINAL)


# Refusals of a request for nodes that do not exist, or that the request itself excludes.
_OF_NODES = (
    "requested node configuration is not available",
    "node count specification invalid",
    "invalid node name",
    "invalid node list",
    "required node not available",
)


def concerns_nodes(message: str) -> bool:
    """Return True for a refusal that may come from the hosts that the request excludes."""
    return any(sign in message.lower() for sign in _OF_NODES)


def checked_id(job_id: str) -> str:
    """Return a job's id. Raises `SchedulerError` if it is none, but perhaps an option."""
    if not _JOB_ID.fullmatch(job_id):
        raise errors.SchedulerError(
            f"{job_id[:99]!r} is recorded as the id of a Slurm job; expected a number. Nothing was "
            "sent to Slurm; find the job by its name with `squeue`"
        )
    return job_id


def queued_jobs(name: str) -> list[JobLine]:
    """Return the jobs called `name` that the controller still knows, newest last, even if ended."""
    # With `-a`, jobs of hidden partitions too.
    command = ["squeue", "-h", "-a", "-t", "all", f"--name={name}"]
    out = call([*command, "-o", "%i|%j|%T|%r|%N|%S|%e"])
    rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 6]
    return [JobLine(r[0], r[1], r[2], r[3], r[4], parse_time(r[5]), parse_time(r[6])) for r in rows]


def recorded_jobs(*, name: str = "", job_id: str = "", since: float = 0.0) -> list[JobLine]:
    """Return the jobs in the accounting database by name or id, oldest first.

    Empty if the site has no accounting. `since` is Unix seconds.
    """
    chosen = [f"--jobs={checked_id(job_id)}"] if job_id else [f"--name={name}"]
    # The clock that wrote `since` may have been ahead. sacct finds no job before its start.
    start = format_time(max(min(since, now()) - 24 * 3600.0, 0.0))
    command = ["sacct", "-n", "-P", "-X", "-D", f"-S{start}", *chosen, "-o", ",".join(SACCT_FIELDS)]
    try:
        out = call(command)
    except errors.SchedulerError as error:
        if any(sign in str(error).lower() for sign in _NO_ACCOUNTING):
            return []
        raise
    rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 6]
    return [JobLine(r[0], r[1], r[2], "", r[5], parse_time(r[3]), parse_time(r[4])) for r in rows]


# What squeue prints for a job without a comment.
NO_COMMENT: Final = "(null)"


def show_job(job_id: str, ask: Ask | None = None) -> JobLine | None:
    """Return the job as the controller knows it, or None if it no longer knows the job."""
    command = ["scontrol", "--all", "-o", "show", "job", checked_id(job_id)]
    try:
        out = (ask or call)(command)
    except errors.SchedulerUnavailableError:
        raise
    except errors.SchedulerError as error:
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


def comment_of(job_id: str) -> list[str]:
    """Return the name of a queued or running job, and the words of its comment.

    The name of a job that Slurm no longer lists is empty. Raises `SchedulerError`.
    """
    out = call(["squeue", "--all", "--noheader", f"--jobs={checked_id(job_id)}", "--format=%j %k"])
    name, _, comment = out.strip().partition(" ")
    return [name, *("" if comment.strip() == NO_COMMENT else comment).split()]


def show_nodes(ask: Ask = call) -> list[dict[str, str]]:
    """Return every node's fields as `scontrol -d show node` prints them, hidden ones too."""
    out = ask(["scontrol", "--all", "-o", "-d", "show", "node"])
    return [parse_fields(line) for line in out.splitlines() if line.startswith("NodeName=")]


def partitions(ask: Ask = call) -> list[dict[str, str]]:
    """Return every partition's fields as `scontrol show partition` prints them, hidden ones too."""
    out = ask(["scontrol", "--all", "-o", "show", "partition"])
    return [parse_fields(line) for line in out.splitlines() if line.startswith("PartitionName=")]


def takes_whole_nodes(resources: Resources, partition: Mapping[str, str]) -> bool:
    """Return True if the spec or its partition makes a job share no node."""
    if str(resources.extra.get("exclusive", False)) in {"True", ""}:
        return True
    # Slurm 26.05 has a field of its own for this.
    return partition.get("OverSubscribe") == "EXCLUSIVE" or partition.get("Exclusive") == "NODE"


def chosen_partitions(
    resources: Resources, known: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """Return the partitions of `known` that a job may run in: those named, or the default."""
    named = resources.partition.split(",") if resources.partition else []
    return [
        fields
        for fields in known
        if fields.get("PartitionName") in named or (not named and fields.get("Default") == "YES")
    ]


def version() -> str:
    """Return the version of this host's Slurm commands, such as `22.05.8`; '' if unknown."""
    words = call(["scontrol", "--version"]).split()
    return words[-1] if words else ""


def is_tested(version: str) -> bool:
    """Return True if the tests ran on this version of Slurm."""
    return version.startswith(tuple(f"{tested}." for tested in TESTED))


def preemption_type(ask: Ask = call) -> str:
    """Return how the site preempts, such as `preempt/partition_prio`, or '' if unknown."""
    return settings(ask).get("PreemptType", "")


def list_qos(ask: Ask = call) -> dict[str, tuple[str, str]]:
    """Return each QOS's preemption grace and the QOSs that it preempts, as sacctmgr prints them."""
    command = ["sacctmgr", "-n", "-P", "show", "qos", "format=Name,GraceTime,Preempt"]
    rows = [line.split("|") for line in ask(command).splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def enforces_qos(ask: Ask = call) -> bool:
    """Return True if the controller enforces the limits of each QOS."""
    enforced = settings(ask).get("AccountingStorageEnforce", "")
    return not {"limits", "qos"}.isdisjoint(enforced.split(","))


def settings(ask: Ask = call) -> dict[str, str]:
    """Return the controller's settings by name, as `scontrol show config` prints them."""
    pairs = (line.partition("=") for line in ask(["scontrol", "show", "config"]).splitlines())
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}


def notice_s(ask: Ask = call) -> float:
    """Return the seconds after which the controller reports that a silent node is down."""
    found = re.match(r"[0-9]+", settings(ask).get("SlurmdTimeout", ""))
    # 0 stands for never, so the usual time is assumed.
    return float(found[0]) if found and int(found[0]) else NOTICE_S


def qos_limits(name: str, ask: Ask = call) -> dict[str, str]:
    """Return the limits of one QOS on its jobs' resources, by sacctmgr's names."""
    fields = ("GrpTRES", "MaxTRES", "MaxTRESPU")
    command = ["sacctmgr", "-n", "-P", "show", "qos", f"name={name}", f"format={','.join(fields)}"]
    rows = [line.split("|") for line in ask(command).splitlines() if line]
    return dict(zip(fields, rows[0], strict=True)) if rows and len(rows[0]) == 3 else {}


def jobs_in_qos(name: str, ask: Ask = call) -> list[tuple[str, str]]:
    """Return the user and the allocated TRES of each job that holds resources under a QOS."""
    command = [
        "squeue",
        "-h",
        "-a",
        "-t",
        "R,CG,CF,S",
        "-q",
        name,
        "-O",
        "UserName:128,tres-alloc:1024",
    ]
    rows = [line.split() for line in ask(command).splitlines()]
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def reservation_nodes(names: str, ask: Ask = call) -> tuple[str, ...]:
    """Return the nodes of reservations. `names` are separated by commas."""
    found: list[str] = []
    for name in names.split(","):
        out = ask(["scontrol", "-o", "show", "reservation", name])
        found += expand_hosts(parse_fields(out).get("Nodes", ""))
    return tuple(found)


def federation() -> str:
    """Return the federation that this cluster belongs to; '' without one or without accounting."""
    out = call(["scontrol", "show", "federation"])
    found = re.search(r"^Federation: *(\S+)", out, re.MULTILINE)
    return found[1] if found else ""


def parse_fields(text: str) -> dict[str, str]:
    """Return `A=1 B=two words C=3` as a dict; a value extends to the next `name=`."""
    marks = list(_FIELD.finditer(text.strip()))
    ends = [mark.start() for mark in marks[1:]] + [len(text.strip())]
    pairs = zip(marks, ends, strict=True)
    return {mark[1]: text.strip()[mark.end() : end].strip() for mark, end in pairs}


def parse_time(text: str) -> float | None:
    """Return a time that `call` got as Unix seconds; None for `Unknown`, `N/A` and the like."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def format_time(seconds: float) -> str:
    """Return Unix seconds as a time for a command that `call` runs."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def parse_minutes(text: str) -> float | None:
    """Return the minutes of a Slurm duration (`1-02:03:04`, `30:00`); None for `UNLIMITED` etc."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(p.isdecimal() for p in parts) or (days and not days.isdecimal()):
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


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return the hosts in Slurm's short form: `n[1-3,7],m2` is n1, n2, n3, n7, m2."""
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
    """Return Unix seconds; a separate function so that tests can replace Slurm's clock."""
    return time.time()


# Answers of Slurm that all processes of this user on this host share.
#
# A controller serves thousands of users, and each supervisor would ask it about its own job
# several times a minute. So one of them asks about all jobs, and the others read its answer.

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
# The same fields, with how often a job was restarted, which `-o` cannot print. Without a size, a
# field is as wide as its value.
_LONG_FORMAT: Final = ",".join(
    f"{name}:|"
    for name in (
        *("JobID", "State", "Reason", "NodeList", "StartTime", "EndTime", "BatchHost"),
        *("RestartCnt", "Name"),
    )
)


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
            raise (errors.SchedulerError if self.is_refusal else errors.SchedulerUnavailableError)(
                self.problem
            )
        return self.output


def shared_call(arguments: Sequence[str], *, age_s: float, since: float = 0.0) -> str:
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
                known = _ask(arguments)
                content = durable.to_json(asdict(known))
                durable.write_bytes(place, content, mode=0o600, below=holdfast_home())
    except (OSError, errors.ForeignFileError, errors.SpecError):
        # Without a usable home there is nothing to share.
        return call(arguments)
    return known.read()


def listed_jobs(age_s: float = JOBS_AGE_S, since: float = 0.0) -> dict[str, JobLine]:
    """Return this user's jobs that have not ended, by id. For `since`, see `shared_call`.

    Raises like `slurm_client.call`.
    """
    rows = _rows(["-o", _FORMAT], 8, age_s=age_s, since=since)
    return {row[0]: _job(row) for row in rows}


def listed_starts(since: float = 0.0) -> dict[str, JobLine]:
    """Return what `listed_jobs` returns, with `Restarts` among the fields.

    Only for clusters that restart jobs, because the options need a newer Slurm.
    """
    rows = _rows(["-O", _LONG_FORMAT], 9, age_s=JOBS_AGE_S, since=since)
    found = {}
    for *row, restarts, name in rows:
        line = _job([*row, name.removesuffix("|")])
        found[line.job_id] = replace(line, fields={**(line.fields or {}), "Restarts": restarts})
    return found


def _rows(options: Sequence[str], count: int, *, age_s: float, since: float) -> list[list[str]]:
    """Return the `count` fields of each of this user's jobs. The last one may have any text."""
    command = ["squeue", "-h", "-a", "-u", str(os.getuid()), *options]
    answer = shared_call(command, age_s=age_s, since=since)
    rows = [line.split("|", count - 1) for line in answer.splitlines()]
    return [row for row in rows if len(row) == count]


def cluster_name() -> str | None:
    """Return the cluster that the Slurm commands of this process ask; None without an answer."""
    asked = (shutil.which("scontrol"), *map(os.environ.get, _CLUSTER))
    with contextlib.suppress(errors.SchedulerError):
        return _cluster_name(asked) or None
    return None


@lru_cache
def _cluster_name(_: tuple[str | None, ...]) -> str:
    ask = partial(shared_call, age_s=CAPACITY_AGE_S)
    return settings(ask).get("ClusterName", "")


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
    with file_locks.locked(lock, LOCK_S, below=holdfast_home(), owner_only=True) as is_locked:
        if not is_locked:
            raise errors.SchedulerUnavailableError(
                f"another process has asked Slurm for {LOCK_S:.0f} s and has no answer yet"
            )
        yield


def _ask(arguments: Sequence[str]) -> _Answer:
    began, asked_at = time.monotonic(), time.time()
    output = problem = ""
    is_refusal = False
    try:
        output = call(arguments)
    except errors.SchedulerError as error:
        problem, is_refusal = str(error), not isinstance(error, errors.SchedulerUnavailableError)
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
        with os.fdopen(reading.open_regular(place), "rb") as stream:
            if os.fstat(stream.fileno()).st_uid != os.geteuid():
                return None
            return _Answer(**json.load(stream))
    except (OSError, errors.ForeignFileError, ValueError, TypeError):
        return None
