"""The documents of one attempt: what was asked, who runs it, and how it ended.

`request.json` is written before anything is queued, `submission.json` once the scheduler took
the job, `claim.json` by the agent of node 0, `stop.json` by whoever wants the attempt to end,
`outcome.json` by the agent of node 0 when it has ended. `submitting.json` is written before each
submission, `missing.json` while an ending is doubted. Times are Unix seconds.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.contracts.bounds import (
    GPUS_PER_NODE_MAX,
    NODES_MAX,
    Count,
    FilePath,
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
from holdfast.contracts.durable import create_bytes, to_json, write_bytes
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.mirrors import Tiers
from holdfast.contracts.paths import RUN_NAME, AttemptPaths, folder_of
from holdfast.contracts.reading import read_bounded
from holdfast.contracts.secrets import EnvironmentValue
from holdfast.contracts.spec import Launch, Resources, Supervision
from holdfast.contracts.spec_part import RECORDED
from holdfast.contracts.states import AttemptState, Cause


class Document(BaseModel):
    """A JSON document on disk; keys that a newer version added are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="after")
    def _numbers_are_bounded(self) -> Self:
        for name, value in self:
            if problem := problem_with_numbers(value):
                raise ValueError(f"{name}: {problem}")
        return self


class RunRecord(Document):
    """`spec.json`: the identity of a run and the spec it was created with."""

    format: int = 1
    uid: Uid = Field(description="identity of the run in every database, 32 hexadecimal digits")
    run: Annotated[str, Field(pattern=f"^{RUN_NAME.pattern}$")] = Field(
        description="the folder's name: the spec's name, with .r2, .r3 … if taken"
    )
    name: Annotated[str, Field(pattern=f"^{RUN_NAME.pattern}$")]
    root: FilePath
    created_at: Moment
    created_by: Name = ""
    spec: dict[str, Any]
    spec_digest: Name
    given: dict[str, Any] | None = Field(
        default=None, description="the part of the spec that a person gave, without defaults"
    )
    forked_from: Name | None = Field(default=None, description="id of the checkpoint it began from")
    forked_path: FilePath | None = Field(default=None, description="that checkpoint's directory")
    forked_uid: Uid | None = Field(default=None, description="uid of the run it was forked from")


class Provenance(Document):
    """What an attempt was submitted with, so that two can be compared; digests are SHA-256."""

    code_commit: Name | None = Field(default=None, description="git's commit of the code's folder")
    code_digest: Name | None = Field(
        default=None, description="of what differs from the commit; None when nothing does"
    )
    config_digest: Name | None = None
    data_digest: Name | None = Field(
        default=None, description="of `data` in the config and its files"
    )
    environment_digest: Name | None = Field(
        default=None, description="of the environment, the interpreter, set-up and container"
    )


class Request(Document):
    """`request.json`: one submission as plain data; `holdfast submit --dry-run` prints it."""

    run_uid: Uid
    run: Name
    run_directory: FilePath
    attempt: Number
    job_name: Name
    executor: Name
    nodes: Annotated[int, Field(ge=0, le=NODES_MAX)]
    gpus_per_node: Annotated[int, Field(ge=0, le=GPUS_PER_NODE_MAX)]
    exclude: tuple[Name, ...] = ()
    command: tuple[Text, ...]
    working_directory: FilePath
    environment: dict[Name, EnvironmentValue]
    config: dict[str, Any]
    launch: Launch
    resources: Resources
    supervision: Supervision
    checkpoint_interval: Step | Name = "auto"
    checkpoint_budget_bytes: Count | None = None
    checkpoint_mirror: FilePath = ""
    checkpoint_local: FilePath = ""
    checkpoint_snapshots: Step | Name = "auto"
    command_digest: Name
    scheduler: dict[str, Any] = Field(description="the executor's own parameters, as handed over")
    created_at: Moment
    reason: Text = Field(description="why this attempt exists: first, or the decision's words")
    provenance: Provenance = Provenance()

    @property
    def world_size(self) -> int:
        """Ranks of the attempt."""
        return self.nodes * self.gpus_per_node

    @property
    def tiers(self) -> Tiers:
        """Where its checkpoints lie besides the run's folder."""
        return Tiers(mirror=self.checkpoint_mirror, local=self.checkpoint_local)


class Submission(Document):
    """`submission.json`: the scheduler took the job."""

    job_id: Name
    executor: Name
    submitted_at: Moment
    pid: Number | None = Field(default=None, description="local executor: the job's session leader")
    process_started_at: Moment | None = None
    boot_id: Name | None = None
    host: Name | None = Field(default=None, description="local executor: the machine it runs on")


class SubmissionTry(Document):
    """`submitting.json`: the scheduler was asked to take the job; what it said when it refused.

    Written before each submission. Without a `refused` and without a submission nobody knows
    whether the scheduler took the job.
    """

    count: Number = Field(description="how often the scheduler was asked, this time included")
    host: Name
    tried_at: Moment
    refused: Text = Field(default="", description="the scheduler's words, when it refused")
    may_pass: bool = Field(default=False, description="the scheduler may take the job later")
    refusals: Number = Field(default=0, description="how often it refused")
    refused_since: Moment | None = Field(default=None, description="the first of these refusals")

    @property
    def may_have_duplicates(self) -> bool:
        """True when the scheduler may hold several jobs of the attempt."""
        return self.count - self.refusals > 1


class Missing(Document):
    """`missing.json`: since when the job, or the outcome of a job that ended, was not found."""

    what: Name
    since: Moment


class Claim(Document):
    """`claim.json`: the agent of node 0 runs this attempt, created exclusively.

    A claim that `is_closed` belongs to nobody: the attempt ended before any job had claimed it,
    and a job that starts after that must not run it.
    """

    job_id: Name
    pid: Number
    process_started_at: Moment
    boot_id: Name
    host: Name
    claimed_at: Moment
    is_closed: bool = False


class StopFile(Document):
    """`stop.json`: end the attempt after one last checkpoint."""

    action: Name = Field(description="pause, stop, cancel, relaunch or drain")
    by: Name
    requested_at: Moment
    deadline_s: Seconds | None = Field(
        default=None, description="seconds from the request; None: as long as the flush takes"
    )
    detail: Text = ""


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
    ending: Name = Field(default="", description="completed, stopped, crashed, hung or killed")


class Outcome(Document):
    """`outcome.json`: how the attempt ended as node 0's agent saw it."""

    attempt: Number | None = Field(
        default=None, description="whose outcome it is; earlier versions did not say"
    )
    state: AttemptState
    cause: Cause | None = None
    evidence: tuple[Text, ...] = ()
    job_id: Name
    hosts: tuple[Name, ...] = ()
    world_size: Ranks
    command_digest: Name | None = None
    resumed_from: Name | None = None
    first_step: Step | None = None
    last_step: Step | None = Field(default=None, description="last step that any rank finished")
    committed_step: Step | None = None
    started_at: Moment
    stop_requested_at: Moment | None = Field(default=None, description="when the signal came")
    stop_committed_at: Moment | None = Field(default=None, description="when the final flush held")
    ended_at: Moment
    traceback: Text | None = Field(default=None, description="of the first failing rank")
    failed_rank: Number | None = None
    failed_host: Name | None = Field(default=None, description="where that rank ran")
    launches: tuple[LaunchRecord, ...] = ()


D = TypeVar("D", bound=Document)


def read_document(kind: type[D], path: Path) -> D | None:
    """The document at `path`, or None when there is none; `HoldfastError` when it is damaged.

    A link, a pipe or a huge file is a `ForeignFileError`.
    """
    try:
        content = read_bounded(path, below=folder_of(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return kind.model_validate_json(content, context=RECORDED)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise HoldfastError(
            f"{path}: not a {kind.__name__}: {where}: {first['msg']}; "
            "restore the file or remove the attempt's folder after saving its checkpoints"
        ) from error


def read_outcome(paths: AttemptPaths) -> Outcome | None:
    """How the attempt ended; None while it has not, or where another attempt's outcome lies there.

    Raises `HoldfastError` when it is damaged.
    """
    outcome = read_document(Outcome, paths.outcome)
    return outcome if outcome is not None and is_of(outcome, paths.number) else None


def read_claim(paths: AttemptPaths) -> Claim | None:
    """The claim of the job that runs the attempt; None while there is none, or a closed one.

    Raises `HoldfastError` when it is damaged.
    """
    claim = read_document(Claim, paths.claim)
    return None if claim is None or claim.is_closed else claim


def close_claim(paths: AttemptPaths) -> bool:
    """Keep every job from claiming the attempt from now on; False when one already has."""
    closed = Claim(
        job_id="",
        pid=0,
        process_started_at=0.0,
        boot_id="",
        host=socket.gethostname(),
        claimed_at=time.time(),
        is_closed=True,
    )
    return create_document(paths.claim, closed) or read_claim(paths) is None


def job_of(submission: Submission | None, claim: Claim | None) -> Submission | None:
    """The job that runs the attempt: the one that claimed it, else the one that was submitted."""
    if claim is None or (submission is not None and submission.job_id == claim.job_id):
        return submission
    if submission is None or submission.executor == "local":
        return submission
    return submission.model_copy(update={"job_id": claim.job_id})


def is_of(outcome: Outcome, number: int) -> bool:
    """True unless it says that it is another attempt's."""
    return outcome.attempt in {None, number}


def write_document(path: Path, document: Document) -> None:
    """Replace `path` by `document`, durably."""
    content = to_json(document.model_dump(mode="json"))
    write_bytes(path, content, below=folder_of(path))


def create_document(path: Path, document: Document) -> bool:
    """Create `path`, durably and exclusively; False when it exists already."""
    return create_bytes(path, to_json(document.model_dump(mode="json")))
