"""The JSON documents of a run and of its attempts. Times are Unix seconds.

- `request.json` is written before anything is queued.
- `submitting.json` is written before each submission.
- `submission.json` is written once the scheduler has accepted the job.
- `claim.json` is created by the agent of node 0 before it trains.
- `terms/NNNN.json` says which node leads after the loss of others, and `terms/NNNN-ends.json` that
  none can.
- `stop.json` is a request to end the attempt.
- `drained.json` says which of the job's nodes are drained, and why.
- `missing.json` is written while the job or its outcome cannot be found.
- `outcome.json` is written by the agent of node 0 when the attempt has ended.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.contracts.disk import durable, filesystems, reading
from holdfast.contracts.disk.bounds import (
    GPUS_PER_NODE_MAX,
    NODES_MAX,
    NUMBER_MAX,
    FilePath,
    JobId,
    Moment,
    Name,
    Number,
    Ranks,
    Seconds,
    Step,
    Text,
    Uid,
    problem_with_numbers,
)
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import RUN_NAME, AttemptPaths, folder_of
from holdfast.contracts.errors import UnreadableRunError
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.part import RECORDED
from holdfast.contracts.spec.resources import Resources, gpus_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.secrets import EnvironmentValue
from holdfast.contracts.spec.sections import Health, Launch, Program, Supervision
from holdfast.contracts.spec.written import SPEC, forget_defaults, keys_of
from holdfast.contracts.states import AttemptState, Cause


class Document(BaseModel):
    """A JSON document on disk. Keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="after")
    def _numbers_are_bounded(self) -> Self:
        for name, value in self:
            if problem := problem_with_numbers(value):
                raise ValueError(f"{name}: {problem}")
        return self


class RunRecord(Document):
    """`spec.json`: the identity of a run, and the spec that it was created with."""

    format: Number = 1
    uid: Uid = Field(description="unique id of the run, 32 hexadecimal digits")
    run: Annotated[str, Field(pattern=f"^{RUN_NAME.pattern}$")] = Field(
        description="name of the run's folder: the spec's name, with .r2, .r3 … if it was taken"
    )
    name: Annotated[str, Field(pattern=f"^{RUN_NAME.pattern}$")]
    root: FilePath
    created_at: Moment
    created_by: Name = ""
    spec: dict[str, Any]
    spec_digest: Name
    given: dict[str, Any] | None = Field(
        default=None, description="the keys that the user gave, without defaults"
    )
    origins: dict[Name, Name] = Field(
        default_factory=dict, description="where given keys come from, if not from the spec itself"
    )
    forked_from: Name | None = Field(default=None, description="id of the checkpoint forked from")
    forked_path: FilePath | None = Field(default=None, description="that checkpoint's directory")
    forked_uid: Uid | None = Field(default=None, description="uid of the run that was forked")
    imported_from: FilePath | None = Field(default=None, description="path of imported weights")

    def read_spec(self) -> RunSpec:
        """Return the recorded spec, with only the given keys as written. Raises `ValueError`."""
        # The record has every key. Without `given`, all defaults would count as written in each
        # relaunch, see decision 88.
        spec = RunSpec.read(self.spec)
        forget_defaults(spec, self.given)
        return spec.with_origins(self.origins)


class Provenance(Document):
    """Digests of an attempt's inputs, to compare attempts. All digests are SHA-256."""

    code_commit: Name | None = Field(default=None, description="git commit of the code's folder")
    code_digest: Name | None = Field(
        default=None, description="digest of the changes since the commit; None without changes"
    )
    config_digest: Name | None = None
    data_digest: Name | None = Field(
        default=None, description="digest of `data` in the config and of the files it names"
    )
    environment_digest: Name | None = Field(
        default=None,
        description="digest of the environment, interpreter, setup lines and container",
    )


class Request(Document):
    """`request.json`: one submission as plain data. `holdfast submit --dry-run` prints it."""

    run_uid: Uid
    run: Name
    run_directory: FilePath
    attempt: Number
    job_name: Name
    executor: Name
    nodes: Annotated[int, Field(ge=0, le=NODES_MAX)]
    # Further nodes of the job that wait idle. Earlier versions have none.
    spare_nodes: Annotated[int, Field(ge=0, le=NODES_MAX)] = 0
    gpus_per_node: Annotated[int, Field(ge=0, le=GPUS_PER_NODE_MAX)]
    # None in an old request: the cluster is unknown, and there is one rank per GPU.
    cluster: Name | None = None
    nproc_per_node: Annotated[int, Field(ge=1, le=GPUS_PER_NODE_MAX)] | None = None
    exclude: tuple[Name, ...] = ()
    place: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0  # n for the n-th of `resources.fallbacks`
    command: tuple[Text, ...]
    working_directory: FilePath
    environment: dict[Name, EnvironmentValue]
    config: dict[str, Any]
    launch: Launch
    program: Program = Program()
    resources: Resources
    supervision: Supervision
    health: Health = Health()
    checkpoint: Checkpointing = Checkpointing()
    command_digest: Name
    scheduler: dict[str, Any] = Field(description="the parameters passed to the executor")
    created_at: Moment
    # How many launches of earlier attempts hung since a person's last relaunch, see `budgets`.
    hangs_before: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    # The number of the successor that runs this attempt, or that this request is of; 0: none.
    successor: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    # Slurm may restart the job after a node failure. The restart may become the next attempt.
    expedite: bool = False
    # The attempt whose job runs this one too, after Slurm restarted it; 0: it has its own job.
    restart_of: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    reason: Text = Field(description="why the attempt was made: `first`, or the decision's reason")
    provenance: Provenance = Provenance()
    sources: dict[Name, Name] | None = Field(
        default=None,
        description="where the written keys of the spec come from; all others have their defaults",
    )

    @property
    def sources_of_checkpoint(self) -> dict[str, str]:
        """Where the written keys of `checkpoint` come from.

        A request of an older version does not say. There, a default counts as not written.
        """
        of = "checkpoint."
        if self.sources is not None:
            return {key: name for key, name in self.sources.items() if key.startswith(of)}
        default = dict(keys_of(Checkpointing(), written=False, where=of))
        now = keys_of(self.checkpoint, written=False, where=of)
        return {key: SPEC for key, value in now if value != default.get(key)}

    @property
    def world_size(self) -> int:
        """The number of ranks of the attempt."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node or self.gpus_per_node

    @property
    def size(self) -> int:
        """The GPUs of the attempt as `elastic` counts them: its ranks if it has no GPUs."""
        return self.nodes * (self.gpus_per_node or self.ranks_per_node)

    @property
    def gpus_on_node(self) -> int:
        """The GPUs that Slurm allocates on each node."""
        return gpus_of(self.resources.gres) if self.resources.gres else self.gpus_per_node

    @property
    def tiers(self) -> Tiers:
        """The mirror and the node-local tier of its checkpoints."""
        return Tiers(mirror=self.checkpoint.mirror or "", local=self.checkpoint.local or "")


class Submission(Document):
    """`submission.json`: the scheduler accepted the job."""

    job_id: JobId
    executor: Name
    submitted_at: Moment
    # How often Slurm had restarted the job when this attempt began.
    restarts: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    # Local executor: the leader of the job's session, when it started (seconds after boot), where.
    pid: Number | None = None
    process_start_s: Seconds | None = None
    boot_id: Name | None = None
    host: Name | None = None


class SubmissionTry(Document):
    """`submitting.json`: a request to the scheduler to accept the job, and its refusal if any.

    It is written before each submission. If `refused` is empty and there is no submission, the
    scheduler may or may not have accepted the job.
    """

    count: Number = Field(description="number of submissions so far, including this one")
    host: Name
    tried_at: Moment
    refused: Text = Field(default="", description="the scheduler's message if it refused the job")
    may_pass: bool = Field(default=False, description="the scheduler may accept the job later")
    refusals: Number = Field(default=0, description="number of refusals")
    refused_since: Moment | None = Field(default=None, description="time of the first refusal")

    @property
    def may_have_duplicates(self) -> bool:
        """True when the scheduler may have several jobs of the attempt."""
        # Each try without a refusal may have made a job, whose answer was lost.
        return self.count - self.refusals > 1


class SuccessorVerdict(Document):
    """`verdict.json`, created exclusively: the attempt that a successor runs, or none.

    In an attempt's folder, it decides about the restart of the attempt's job. `is_gone` is set when
    the scheduler no longer has the job of a successor that runs none.
    """

    attempt: Number = Field(description="number of the attempt that it runs; 0: it runs none")
    # Of a job that Slurm restarts: the start that runs the attempt. A later one does not.
    restarts: Annotated[int, Field(ge=0, le=NUMBER_MAX)] = 0
    reason: Text = ""
    decided_at: Moment
    is_gone: bool = False


class Missing(Document):
    """`missing.json`: since when a job, an ended job's outcome or its final state is missing.

    `since` maps boot ids to monotonic seconds, because each host counts by its own clock, which
    nobody can set. `heard` is the digest of the heartbeats at that time.
    """

    what: Name
    since: Annotated[dict[Name, Seconds], Field(max_length=64)]
    heard: Name = ""


class Claim(Document):
    """`claim.json`, created exclusively: the agent of node 0 runs this attempt.

    A claim with `is_closed` belongs to no job: the attempt ended unclaimed, and no job may run it.
    """

    job_id: JobId
    pid: Number
    process_start_s: Seconds = Field(description="start of the process, seconds after boot")
    boot_id: Name
    host: Name
    claimed_at: Moment
    is_closed: bool = False

    @classmethod
    def closed(cls) -> Claim:
        """Return a claim that belongs to no job, made now on this host."""
        return cls(
            job_id="",
            pid=0,
            process_start_s=0.0,
            boot_id="",
            host=socket.gethostname(),
            claimed_at=time.time(),
            is_closed=True,
        )


class Term(Document):
    """`terms/NNNN.json`, created exclusively: this node leads the attempt from now on.

    Node 0 leads first, without such a file. After a term with `is_end`, no node may lead. With
    `is_end`, `terms/NNNN-ends.json` has the node that found that none can continue after term NNNN.
    `terms/NNNN-begins.json` has the node that leads if launches begin in term NNNN, or another one,
    which has decided that none does.
    """

    number: Number
    node: Number
    host: Name
    job_id: JobId
    taken_at: Moment
    is_end: bool = False


class StopFile(Document):
    """`stop.json`: a request to end the attempt after one last checkpoint."""

    action: Name = Field(description="pause, stop, cancel, relaunch or drain")
    by: Name
    order: Number = Field(default=0, description="the number of the run's order; 0: none")
    requested_at: Moment
    deadline_s: Seconds | None = Field(
        default=None, description="seconds from the request; None: no limit; 0: no last checkpoint"
    )
    detail: Text = ""


class DrainedNodes(Document):
    """`drained.json`: the nodes of the job that start no more jobs, by host, and the reasons."""

    hosts: dict[Name, Text]


class LaunchRecord(Document):
    """One launch of torchrun inside an attempt."""

    number: Number
    started_at: Moment
    ended_at: Moment | None = None
    exit_code: Number | None = None
    resumed_from: Name | None = None
    command_digest: Name | None = None
    first_step: Step | None = None
    last_step: Step | None = None
    ending: Name = Field(
        default="", description="completed, stopped, crashed, hung, killed or drained"
    )
    cause: Cause | None = Field(default=None, description="why it crashed or hung")


class Outcome(Document):
    """`outcome.json`: how the attempt ended, as recorded by node 0's agent."""

    attempt: Number | None = Field(
        default=None, description="number of the attempt; earlier versions left it out"
    )
    state: AttemptState
    cause: Cause | None = None
    evidence: tuple[Text, ...] = ()
    job_id: JobId
    hosts: tuple[Name, ...] = ()
    world_size: Ranks
    command_digest: Name | None = None
    resumed_from: Name | None = None
    first_step: Step | None = None
    last_step: Step | None = Field(default=None, description="last step that any rank finished")
    committed_step: Step | None = None
    started_at: Moment
    stop_requested_at: Moment | None = Field(default=None, description="time of the stop request")
    stop_committed_at: Moment | None = Field(default=None, description="time of the last commit")
    ended_at: Moment
    traceback: Text | None = Field(default=None, description="traceback of the first failed rank")
    failed_rank: Number | None = None
    failed_host: Name | None = Field(default=None, description="host of the first failed rank")
    unhealthy_hosts: tuple[Name, ...] = Field(
        default=(), description="hosts whose health checks failed; later attempts do not use them"
    )
    launches: tuple[LaunchRecord, ...] = ()


D = TypeVar("D", bound=Document)


def read_document(kind: type[D], path: Path) -> D | None:
    """Return the document at `path`, or None if it does not exist.

    Raises `UnreadableRunError` for a damaged document, and `ForeignFileError` for a link, a pipe or
    a huge file.
    """
    try:
        content = reading.read_bounded(path, below=folder_of(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # `RECORDED` omits the rules for what a person may write. A rule that became stricter must
        # not make a live run unreadable, see decision 44.
        return kind.model_validate_json(content, context=RECORDED)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        # Without its record, a folder is not a run.
        last = "move the run's folder out of the root"
        if kind is not RunRecord:
            last = "save the run's checkpoints and delete the attempt's folder"
        raise UnreadableRunError(
            f"{path}: not a valid {kind.__name__}: {where}: {first['msg']}; restore the file, or "
            f"{last}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class AttemptDocuments:
    """The documents of an attempt at one moment; None for those that do not exist.

    A closed claim counts as none, and so does the outcome of another attempt.
    """

    request: Request | None
    submission: Submission | None
    claim: Claim | None
    outcome: Outcome | None

    @property
    def job(self) -> Submission | None:
        """The job that runs the attempt: the claiming job, else the submitted one."""
        return job_of(self.submission, self.claim)


def read_documents(paths: AttemptPaths) -> AttemptDocuments:
    """Read the documents that the attempt's folder lists; no others are looked up.

    So a document that another host creates is seen immediately, see `filesystems.is_there`. Raises
    `UnreadableRunError` for a damaged one.
    """
    try:
        # One listing for all documents: the server answers it, where a look-up may come from a
        # cache, see decision 48.
        names = frozenset(os.listdir(paths.directory))
    except (FileNotFoundError, NotADirectoryError):
        names = frozenset()

    def read(kind: type[D], path: Path) -> D | None:
        if path.name not in names:
            return None
        if (found := read_document(kind, path)) is None:
            # The folder lists it, so a failed read came from a cached absence. Ask the server once.
            filesystems.look_up(path)
            found = read_document(kind, path)
        return found

    claim, outcome = read(Claim, paths.claim), read(Outcome, paths.outcome)
    return AttemptDocuments(
        request=read(Request, paths.request),
        submission=read(Submission, paths.submission),
        claim=None if claim is None or claim.is_closed else claim,
        outcome=outcome if outcome is not None and is_of(outcome, paths.number) else None,
    )


def read_outcome(paths: AttemptPaths) -> Outcome | None:
    """Return how the attempt ended; None without an outcome, or with another attempt's outcome.

    Raises `UnreadableRunError` when it is damaged.
    """
    outcome = read_document(Outcome, paths.outcome)
    return outcome if outcome is not None and is_of(outcome, paths.number) else None


def read_claim(paths: AttemptPaths) -> Claim | None:
    """Return the claim of the job that runs the attempt; None without a claim or if it is closed.

    Raises `UnreadableRunError` when it is damaged.
    """
    claim = read_document(Claim, paths.claim)
    return None if claim is None or claim.is_closed else claim


def newest_term(attempt: AttemptPaths) -> Term | None:
    """Return the newest term after the first; None if node 0 has led from the beginning."""
    return read_terms(attempt)[0]


def read_terms(attempt: AttemptPaths) -> tuple[Term | None, frozenset[int]]:
    """Return the newest term, see `newest_term`, and the terms after which no node continues.

    Costs a listing and one read, however many nodes and launches there are.
    """
    try:
        names = [name.removesuffix(".json") for name in os.listdir(attempt.terms)]
    except FileNotFoundError:
        return None, frozenset()
    # A term that is being written has another name until it is complete.
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    parts = [name.removesuffix("-ends") for name in names if name.endswith("-ends")]
    ends = frozenset(int(part) for part in parts if part.isdecimal())
    return read_document(Term, attempt.term(number)) if number else None, ends


def close_claim(paths: AttemptPaths) -> bool:
    """Prevent jobs from claiming the attempt. Return False if a job has already claimed it."""
    # Exclusive, so either a job or this process gets the claim, never both.
    return create_document(paths.claim, Claim.closed()) or read_claim(paths) is None


def job_of(submission: Submission | None, claim: Claim | None) -> Submission | None:
    """Return the job that runs the attempt: the claiming job, else the submitted one."""
    if claim is None or submission is None or submission.executor == "local":
        return submission
    # With a lost answer of `sbatch`, an attempt may have two jobs. The one that claimed it trains,
    # see decision 34.
    return submission.model_copy(update={"job_id": claim.job_id})


def is_of(outcome: Outcome, number: int) -> bool:
    """Return False if the outcome names another attempt than `number`."""
    return outcome.attempt in {None, number}


def write_document(path: Path, document: Document) -> None:
    """Replace `path` with `document`, durably."""
    content = durable.to_json(document.model_dump(mode="json"))
    durable.write_bytes(path, content, below=folder_of(path))


def create_document(path: Path, document: Document) -> bool:
    """Create `path` durably and exclusively. Return False if it already exists."""
    return durable.create_bytes(path, durable.to_json(document.model_dump(mode="json")))
