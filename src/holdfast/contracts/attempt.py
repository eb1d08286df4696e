"""The documents of one attempt: what was asked, who runs it, and how it ended.

`request.json` is written before anything is queued, `submission.json` once the scheduler took
the job, `claim.json` by the agent of node 0, `stop.json` by whoever wants the attempt to end,
`outcome.json` by the agent of node 0 when it has ended. Times are Unix seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.contracts.durable import create_bytes, to_json, write_bytes
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.mirrors import Tiers
from holdfast.contracts.paths import AttemptPaths
from holdfast.contracts.spec import Launch, Resources, Supervision
from holdfast.contracts.states import AttemptState, Cause


class Document(BaseModel):
    """A JSON document on disk; keys that a newer version added are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RunRecord(Document):
    """`spec.json`: the identity of a run and the spec it was created with."""

    format: int = 1
    uid: str = Field(description="identity of the run in every database, 32 hexadecimal digits")
    run: str = Field(description="the folder's name: the spec's name, with .r2, .r3 … if taken")
    name: str
    root: str
    created_at: float
    created_by: str = ""
    spec: dict[str, Any]
    spec_digest: str
    forked_from: str | None = Field(default=None, description="id of the checkpoint it began from")
    forked_path: str | None = Field(default=None, description="that checkpoint's directory")
    forked_uid: str | None = Field(default=None, description="uid of the run it was forked from")


class Provenance(Document):
    """What an attempt was submitted with, so that two can be compared; digests are SHA-256."""

    code_commit: str | None = Field(default=None, description="git's commit of the code's folder")
    code_digest: str | None = Field(
        default=None, description="of what differs from the commit; None when nothing does"
    )
    config_digest: str | None = None
    data_digest: str | None = Field(
        default=None, description="of `data` in the config and its files"
    )
    environment_digest: str | None = Field(
        default=None, description="of the environment, the interpreter, set-up and container"
    )


class Request(Document):
    """`request.json`: one submission as plain data; `holdfast submit --dry-run` prints it."""

    run_uid: str
    run: str
    run_directory: str
    attempt: int
    job_name: str
    executor: str
    nodes: int
    gpus_per_node: int
    exclude: tuple[str, ...] = ()
    command: tuple[str, ...]
    working_directory: str
    environment: dict[str, str]
    config: dict[str, Any]
    launch: Launch
    resources: Resources
    supervision: Supervision
    checkpoint_interval: int | str = "auto"
    checkpoint_budget_bytes: int | None = None
    checkpoint_mirror: str = ""
    checkpoint_local: str = ""
    checkpoint_snapshots: int | str = "auto"
    command_digest: str
    scheduler: dict[str, Any] = Field(description="the executor's own parameters, as handed over")
    created_at: float
    reason: str = Field(description="why this attempt exists: first, or the decision's words")
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

    job_id: str
    executor: str
    submitted_at: float
    pid: int | None = Field(default=None, description="local executor: the job's session leader")
    process_started_at: float | None = None
    boot_id: str | None = None
    host: str | None = Field(default=None, description="local executor: the machine it runs on")


class Claim(Document):
    """`claim.json`: the agent of node 0 runs this attempt, created exclusively."""

    job_id: str
    pid: int
    process_started_at: float
    boot_id: str
    host: str
    claimed_at: float


class StopRequest(Document):
    """`stop.json`: end the attempt after one last checkpoint."""

    action: str = Field(description="pause, stop, cancel, relaunch or drain")
    by: str
    requested_at: float
    deadline_s: float | None = Field(
        default=None, description="seconds from the request; None: as long as the flush takes"
    )
    detail: str = ""


class IncarnationRecord(Document):
    """One launch of torchrun inside an attempt."""

    number: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    resumed_from: str | None = None
    command_digest: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    ending: str = Field(default="", description="completed, stopped, crashed, hung or killed")


class Outcome(Document):
    """`outcome.json`: how the attempt ended as node 0's agent saw it."""

    attempt: int | None = Field(
        default=None, description="whose outcome it is; earlier versions did not say"
    )
    state: AttemptState
    cause: Cause | None = None
    evidence: tuple[str, ...] = ()
    job_id: str
    hosts: tuple[str, ...] = ()
    world_size: int
    command_digest: str | None = None
    resumed_from: str | None = None
    first_step: int | None = None
    last_step: int | None = Field(default=None, description="last step that any rank finished")
    committed_step: int | None = None
    started_at: float
    stop_requested_at: float | None = Field(default=None, description="when the signal came")
    stop_committed_at: float | None = Field(default=None, description="when the final flush held")
    ended_at: float
    traceback: str | None = Field(default=None, description="of the first failing rank")
    failed_rank: int | None = None
    failed_host: str | None = Field(default=None, description="where that rank ran")
    incarnations: tuple[IncarnationRecord, ...] = ()


D = TypeVar("D", bound=Document)


def read_document(kind: type[D], path: Path) -> D | None:
    """The document at `path`, or None when there is none; `HoldfastError` when it is damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise HoldfastError(
            f"{path}: not a {kind.__name__}: {error.errors()[0]['msg']}; "
            "restore the file or remove the attempt's folder after saving its checkpoints"
        ) from error


def read_outcome(paths: AttemptPaths) -> Outcome | None:
    """How the attempt ended; None while it has not, or where another attempt's outcome lies there.

    Raises `HoldfastError` when it is damaged.
    """
    outcome = read_document(Outcome, paths.outcome)
    return outcome if outcome is not None and is_of(outcome, paths.number) else None


def is_of(outcome: Outcome, number: int) -> bool:
    """True unless it says that it is another attempt's."""
    return outcome.attempt in {None, number}


def write_document(path: Path, document: Document) -> None:
    """Replace `path` by `document`, durably."""
    write_bytes(path, to_json(document.model_dump(mode="json")))


def create_document(path: Path, document: Document) -> bool:
    """Create `path`, durably and exclusively; False when it exists already."""
    return create_bytes(path, to_json(document.model_dump(mode="json")))
