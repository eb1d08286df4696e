"""A played Slurm: it answers the commands that Holdfast's own Slurm client runs.

It queues and starts jobs, and keeps ended ones as a controller and an accounting database do. It
can be silent, lose a node, or restart without its state.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.interleavings.stage import Stage

SILENT: Final = "Unable to contact slurm controller (connect failure)"
# A command that gets no answer takes this long.
SILENT_S: Final = 5.0
START_S: Final = 1.0
SUCCESSOR: Final = "holdfast.workers.agent.successor"
RESTARTED: Final = "holdfast.workers.agent.restart"
EXPEDITING: Final = "EXPEDITING"
HELD: Final = "REQUEUE_HOLD"
ENDED_KNOWN_S: Final = 300.0
WAITS: Final = frozenset({"PENDING", EXPEDITING})
LIVE: Final = frozenset({*WAITS, HELD, "RUNNING", "COMPLETING"})
_OPTION: Final = re.compile(r"^#SBATCH --?([a-zA-Z-]+)(?:=(.*))?$", re.MULTILINE)
# The letters of squeue's long names. None stands for the count of restarts.
_LETTERS: Final = {
    "JobID": "i", "State": "T", "Reason": "r", "NodeList": "N", "StartTime": "S",
    "EndTime": "e", "BatchHost": "B", "RestartCnt": "c", "Name": "j",
}  # fmt: skip
_REQUEST: Final = re.compile(r"(/\S+/request\.json)")


@dataclass
class Job:
    """One job. `state` is as sacct prints it, so `CANCELLED by 0` after a scancel."""

    id: str
    name: str
    nodes: int
    gpus: int
    partition: str
    exclude: frozenset[str]
    request: Path | None
    submitted_at: float
    state: str = "PENDING"
    hosts: tuple[str, ...] = ()
    batch_host: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    # The job after which it may start, and whether it then waits for an attempt to run.
    after: str = ""
    is_successor: bool = False
    # How often it was restarted, and the rows of its earlier starts in the accounting.
    is_expedited: bool = False
    restarts: int = 0
    starts: list[dict[str, str]] = field(default_factory=list)
    # The controller forgets jobs a while after they ended, or when it loses its state.
    is_known: bool = True

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


@dataclass
class Node:
    """A node and what it has."""

    name: str
    partition: str
    gpus: int = 4
    is_up: bool = True
    # GPUs that other users' jobs hold.
    taken: int = 0
    # Why its operator drains it: its jobs go on, and no other one starts on it.
    drained: str = ""


@dataclass
class Cluster:
    """The controller, its nodes and its jobs. Nothing happens unless the stage runs something."""

    stage: Stage
    start_agent: Callable[[Job], None]
    signal_agent: Callable[[Job, str], None]
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    silent_until: float = 0.0
    # While it is silent, it does what it is asked. Only its answers are lost.
    hears: bool = False
    # The next submission is accepted, and its answer does not arrive.
    loses_answer: bool = False
    submissions: list[tuple[float, str]] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)

    # --- the controller -----------------------------------------------------------------

    def free_on(self, node: Node) -> int:
        held = sum(j.gpus for j in self.jobs.values() if node.name in j.hosts and j.is_live)
        return node.gpus - node.taken - held

    def schedule(self) -> None:
        """Start the pending jobs that fit, expedited ones first, then the oldest."""
        if self.is_silent and not self.hears:
            return
        for job in sorted(self.jobs.values(), key=lambda job: job.state != EXPEDITING):
            if job.state not in WAITS or self.stage.now - job.submitted_at < START_S:
                continue
            if self._depends(job):
                continue
            fit = [
                node.name
                for node in self.nodes.values()
                if node.is_up
                and not node.drained
                and node.partition == job.partition
                and node.name not in job.exclude
                and self.free_on(node) >= job.gpus
            ]
            if len(fit) >= job.nodes:
                job.hosts = tuple(fit[: job.nodes])
                job.batch_host, job.started_at = job.hosts[0], self.stage.now
                job.state = "RUNNING"
                self.start_agent(job)

    def _depends(self, job: Job) -> bool:
        """Return True while the job may not start because of another one."""
        other = self.jobs.get(job.after)
        return other is not None and self._known(other) and other.is_live

    def _reason(self, job: Job) -> str:
        if job.state not in WAITS:
            return "job_requeued_in_held_state" if job.state == HELD else "None"
        return "Dependency" if self._depends(job) else "Resources"

    def end(self, job: Job, state: str) -> None:
        """A job has ended, and its nodes are free. Slurm may restart it."""
        if not job.is_live:
            return
        after = {"NODE_FAIL": EXPEDITING, "FAILED": HELD}.get(state, "")
        if not job.is_expedited or not after or job.state in {*WAITS, HELD}:
            job.state, job.ended_at = state, self.stage.now
            return
        job.state, job.ended_at = state, self.stage.now
        job.starts.append(self._row(job))
        job.restarts += 1
        job.state, job.ended_at, job.started_at = after, None, None
        job.hosts, job.batch_host, job.submitted_at = (), "", self.stage.now

    @property
    def is_silent(self) -> bool:
        return self.stage.now < self.silent_until

    def lose_node(self, job: Job) -> None:
        """The leading node of a job is lost, and with it the agent. Slurm ends the job."""
        self.nodes[job.batch_host].is_up = False
        self.signal_agent(job, "SIGKILL")
        self.end(job, "NODE_FAIL")

    def restart_empty(self) -> None:
        """The controller restarts without its state: its jobs are gone, and slurmd kills them.

        The accounting database then calls them cancelled, without a user.
        """
        for job in self.jobs.values():
            if job.is_live:
                self.signal_agent(job, "SIGKILL")
                self.end(job, "CANCELLED")
            job.is_known = False

    def _known(self, job: Job) -> bool:
        is_recent = job.ended_at is None or self.stage.now - job.ended_at < ENDED_KNOWN_S
        return job.is_known and is_recent

    # --- commands -----------------------------------------------------------------------

    def run(self, words: list[str]) -> tuple[int, str, str]:
        """Run a command; return its exit status, output and errors."""
        if "sbatch" in words:
            return self._sbatch(words)
        name = words[0]
        if name == "git":
            return 128, "", "fatal: not a git repository"
        answer = {
            "squeue": self._squeue,
            "sacct": self._sacct,
            "scontrol": self._scontrol,
            "scancel": self._scancel,
        }.get(name)
        if answer is None:
            return self._unknown(words)
        self.stage.call("order" if name == "scancel" else "ask", "scheduler")
        if self.is_silent:
            if self.hears:
                answer(words)
            self.stage.sleep(SILENT_S)
            return 1, "", f"{name}: error: {SILENT}"
        return answer(words)

    def _unknown(self, words: list[str]) -> tuple[int, str, str]:
        self.strange.append(shlex.join(words))
        return 1, "", f"{words[0]}: error: unrecognized option"

    def _sbatch(self, words: list[str]) -> tuple[int, str, str]:
        self.stage.call("order", "scheduler")
        failed = "sbatch: error: Batch job submission failed: "
        if self.is_silent and not self.hears:
            self.stage.sleep(SILENT_S)
            return 1, "", failed + SILENT
        text = Path(words[-1]).read_text()
        given = {name: (value or "").strip('"') for name, value in _OPTION.findall(text)}
        request = _REQUEST.search(text)
        per_node = given.get("gpus-per-node", "0").rpartition(":")[2]
        job = Job(
            id=str(len(self.jobs) + 101),
            name=given.get("job-name", ""),
            nodes=int(given.get("nodes", "1")),
            gpus=int(per_node or 0),
            partition=given.get("partition", "main"),
            exclude=frozenset(filter(None, given.get("exclude", "").split(","))),
            request=Path(request[1]) if request else None,
            submitted_at=self.stage.now,
            after=given.get("dependency", "").partition(":")[2],
            is_successor=SUCCESSOR in text,
            is_expedited=given.get("requeue") == "expedite" and RESTARTED in text,
        )
        could = [
            node
            for node in self.nodes.values()
            if node.partition == job.partition and node.name not in job.exclude
        ]
        if len(could) < job.nodes:
            return 1, "", failed + "Requested node configuration is not available"
        self.jobs[job.id] = job
        self.submissions.append((self.stage.now, job.name))
        self.stage.call("order", "scheduler")
        if self.loses_answer or self.is_silent:
            self.loses_answer = False
            self.stage.sleep(SILENT_S)
            return 1, "", failed + "Socket timed out on send/recv operation"
        return 0, f"Submitted batch job {job.id}\n", ""

    def _squeue(self, words: list[str]) -> tuple[int, str, str]:
        names = {w.partition("=")[2] for w in words if w.startswith("--name=")}
        is_all = "all" in words
        if "-O" in words:
            fields = [name.partition(":")[0] for name in words[-1].split(",")]
            form = "".join(f"%{_LETTERS[name]}|" for name in fields)
        else:
            form = words[words.index("-o") + 1]
        rows = [
            form.replace("%i", job.id)
            .replace("%T", job.state.split(" ")[0])
            .replace("%r", self._reason(job))
            .replace("%N", ",".join(job.hosts))
            .replace("%S", _time(job.started_at, "N/A"))
            .replace("%e", _time(job.ended_at, "N/A"))
            .replace("%B", job.batch_host or "n/a")
            .replace("%c", str(job.restarts))
            .replace("%j", job.name)
            for job in self.jobs.values()
            if self._known(job) and (job.is_live or is_all) and (not names or job.name in names)
        ]
        return 0, "".join(f"{row}\n" for row in rows), ""

    def _sacct(self, words: list[str]) -> tuple[int, str, str]:
        chosen = [w.partition("=") for w in words if w.startswith(("--jobs=", "--name="))]
        fields = words[words.index("-o") + 1].split(",")
        rows = []
        for job in self.jobs.values():
            if not all((job.id if key == "--jobs" else job.name) == v for key, _, v in chosen):
                continue
            for facts in (*job.starts, self._row(job)):
                rows.append("|".join(facts.get(name, "") for name in fields))
        return 0, "".join(f"{row}\n" for row in rows), ""

    def _row(self, job: Job) -> dict[str, str]:
        """Return what the accounting has of the newest start of a job."""
        return {
            "JobIDRaw": job.id,
            "JobName": job.name,
            "State": "PENDING" if job.state in {*WAITS, HELD} else job.state,
            "Start": _time(job.started_at, "Unknown"),
            "End": _time(job.ended_at, "Unknown"),
            "NodeList": ",".join(job.hosts) or "None assigned",
            "ExitCode": "0:0",
        }

    def _scontrol(self, words: list[str]) -> tuple[int, str, str]:
        if words[-2:] == ["show", "config"]:
            as_of = _time(self.stage.now, "")
            text = f"Configuration data as of {as_of}\nClusterName = played\n"
            text += "SLURM_VERSION = 26.05.5\nSlurmctldParameters = enable_expedited_requeue\n"
            return 0, text + "AccountingStorageEnforce = none\nPreemptType = preempt/none\n", ""
        if words[-2:] == ["show", "node"]:
            return 0, "".join(self._node_line(node) for node in self.nodes.values()), ""
        if words[-2:] == ["show", "partition"]:
            named = sorted({node.partition for node in self.nodes.values()})
            rows = [
                f"PartitionName={n} Default={'YES' if n == 'main' else 'NO'} State=UP "
                "OverSubscribe=NO\n"
                for n in named
            ]
            return 0, "".join(rows), ""
        if words[-3:-1] == ["show", "job"]:
            job = self.jobs.get(words[-1])
            if job is None or not self._known(job):
                return 1, "", "slurm_load_jobs error: Invalid job id specified"
            return 0, self._job_line(job), ""
        if words[1:2] == ["update"]:
            return self._update(words)
        return self._unknown(words)

    def _update(self, words: list[str]) -> tuple[int, str, str]:
        given = dict(word.partition("=")[::2] for word in words[2:])
        job = self.jobs.get(given.get("JobId", ""))
        if job is None or not self._known(job):
            return self._unknown(words)
        if set(given) == {"JobId", "Requeue"}:
            job.is_expedited = given["Requeue"] != "0"
            return 0, "", ""
        if set(given) not in ({"JobId", "ExcNodeList"}, {"JobId", "Dependency"}):
            return self._unknown(words)
        if job.state != "PENDING":
            return 1, "", "scontrol: error: Job is no longer pending execution"
        if "Dependency" in given:
            job.after = given["Dependency"]
            return 0, "", ""
        job.exclude = frozenset(filter(None, given["ExcNodeList"].split(",")))
        return 0, "", ""

    def _node_line(self, node: Node) -> str:
        used = node.gpus - self.free_on(node)
        state = "DOWN" if not node.is_up else "ALLOCATED" if used else "IDLE"
        return (
            f"NodeName={node.name} CPUAlloc={used} CPUTot=16 Gres=gpu:{node.gpus} "
            f"GresUsed=gpu:{used} State={state}{'+DRAIN' if node.drained else ''} "
            f"Partitions={node.partition}{f' Reason={node.drained}' if node.drained else ''}\n"
        )

    def _job_line(self, job: Job) -> str:
        return (
            f"JobId={job.id} JobName={job.name} JobState={job.state.split(' ')[0]} "
            f"Reason={self._reason(job)} Restarts={job.restarts} "
            f"Dependency={f'afterany:{job.after}(unfulfilled)' if job.after else '(null)'} "
            f"StartTime={_time(job.started_at, 'Unknown')} "
            f"EndTime={_time(job.ended_at, 'Unknown')} "
            f"NodeList={','.join(job.hosts) or '(null)'} BatchHost={job.batch_host} "
            f"ExcNodeList={','.join(sorted(job.exclude)) or '(null)'} ExitCode=0:0\n"
        )

    def _scancel(self, words: list[str]) -> tuple[int, str, str]:
        if any(word.startswith("-") and word != "--state=PENDING" for word in words[1:]):
            return self._unknown(words)
        job = self.jobs.get(words[-1])
        if job is None or not self._known(job):
            return 1, "", f"scancel: error: Kill job error on job id {words[-1]}: Invalid job id"
        if job.state in {*WAITS, HELD}:
            self.end(job, "CANCELLED by 0")
        elif job.state == "RUNNING" and "--state=PENDING" not in words:
            self.signal_agent(job, "SIGTERM")
        return 0, "", ""


def _time(moment: float | None, missing: str) -> str:
    """Return Unix seconds as Slurm prints them, in local time."""
    if moment is None:
        return missing
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%dT%H:%M:%S")
