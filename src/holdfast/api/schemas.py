"""The request and response models of the API. More response types are in `lineage.views`.

Unless a description says otherwise, times are ISO 8601 in UTC, durations are in seconds and
sizes are in bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from holdfast.api.tokens import Role
from holdfast.contracts.records.annotations import NOTE_CHARACTERS_MAX
from holdfast.contracts.records.orders import OrderState
from holdfast.contracts.spec.tags import TAG, TAGS_MAX, problem_with_tag
from holdfast.lineage.queries import durability, reports, views
from holdfast.workers.checkpoints import exports

TOKEN_CHARACTERS_MAX: Final = 200
TAG_SHOWN_MAX: Final = 200

T = TypeVar("T")


def _check_tag(tag: str) -> str:
    if problem := problem_with_tag(tag):
        raise ValueError(problem)
    return tag


# A field's pattern would be shown to people as it is.
Tag = Annotated[
    str,
    Field(max_length=TAG_SHOWN_MAX, json_schema_extra={"pattern": f"^{TAG.pattern}$"}),
    AfterValidator(_check_tag),
]


class Page(BaseModel, Generic[T]):
    """One page of a list; `next` is the cursor of the next page, null on the last one."""

    items: list[T]
    next: str | None


class Problem(BaseModel):
    """The body of every error response: `code` is for programs, `message` for people."""

    status: int
    code: str
    message: str
    problems: list[str] = []
    by: str | None = Field(default=None, description="409: who made the pending request")
    action: str | None = Field(default=None, description="409: the action that is pending")
    at: float | None = Field(
        default=None, description="409: when the pending request was made, in Unix seconds"
    )


class Session(BaseModel):
    """The caller of this request and the CSRF token of its browser session."""

    name: str | None = Field(description="null if the request is not authenticated")
    role: Role | None
    csrf: str | None = Field(
        description="CSRF token: send it in X-Holdfast-CSRF with every write request"
    )
    version: str


class Health(BaseModel):
    """The health of the server. `ingest_lag_s` and `round_s` are seconds."""

    ok: bool
    version: str
    database: str
    ingest_lag_s: float | None
    round_s: float
    streams: int
    roots: dict[str, bool]
    problems: dict[str, str]


class Noticed(BaseModel):
    """An alert about ranks, nodes or losses, such as a hang; `at` is Unix seconds."""

    kind: str
    attempt: int | None
    at: float
    text: str
    dumps: list[str]


class WaitingSuccessor(BaseModel):
    """The job that waits in the queue to follow the attempt `after_attempt`.

    `submitted_at` is Unix seconds. It and `job_id` are null while no answer of Slurm is known.
    """

    number: int
    job_id: str | None
    after_attempt: int
    gpus: int
    submitted_at: float | None


class Crash(BaseModel):
    """The rank that failed first in a crashed launch.

    `signal` names the signal that killed it, such as `signal 9 (SIGKILL)`. Otherwise `exit_code` is
    its exit status.
    """

    attempt: int
    launch: int
    rank: int
    host: str | None
    signal: str | None
    exit_code: int | None


class FailedSave(BaseModel):
    """A save that was not committed; `at` is Unix seconds."""

    checkpoint: str
    step: int
    error: str
    at: float


class OperatorRequest(BaseModel):
    """An operator's request for a run; `at` is Unix seconds.

    `after_attempt` is the newest attempt at that time. It is 0 before the first attempt. `number`
    is the number of the order. `state` is pending, taken, done, failed or overtaken, and `detail`
    is the reason for it.
    """

    number: int
    action: str
    by: str
    at: float
    gpus: int | None
    after_attempt: int
    state: OrderState
    detail: str


class Supervision(BaseModel):
    """The supervisor of a live run that is not paused.

    `is_alive` is false if no process holds the run's lock. It is null while a supervisor may still
    be starting, and for the run of another user, whose lock the server cannot read. `host` and
    `pid` are those of the newest supervisor. If `is_remote` is true, that host is another one, and
    its lock may not be visible from this server.
    """

    is_alive: bool | None
    is_remote: bool
    host: str | None
    pid: int | None


class RunLine(views.RunRow):
    """One row of the list of runs; a live run has its newest step and its seconds per step."""

    live_step: int | None
    step_s: float | None


class UnreadableRun(BaseModel):
    """A run's folder that cannot be read, and the reason."""

    run: str
    path: str
    reason: str


class RunPage(Page[RunLine]):
    """One page of runs. The first page also lists the folders of runs that cannot be read.

    Only the names of such runs are known, so they are listed only if the request filters by
    neither state nor time. A run that could be read earlier is also among the items, with its
    last known values.
    """

    unreadable: list[UnreadableRun] = []


class TrackerRun(BaseModel):
    """The run of an experiment tracker; `url` is null if the tracker has no web page of it."""

    tracker: str
    tracker_id: str
    url: str | None


class Unprotected(BaseModel):
    """Something that a running launch lacks, so that the loss of a node costs more than expected.

    `lacks` is `copies` of a node's snapshots at its neighbour, or `spares`: all spare nodes are
    used. `host` is null if it concerns all nodes. `text` is the cause, and `action` what helps.
    `at` is Unix seconds.
    """

    lacks: Literal["copies", "spares"]
    host: str | None
    text: str
    action: str
    at: float


class RunDetail(views.RunView):
    """The output of `holdfast show RUN --json`, with the progress of the live attempt.

    `steps_total` is null if neither the spec nor the program tells the number of steps.
    `gpus_fitting` are the allowed GPU counts at which the newest checkpoint can continue, or null
    if all of them are.
    `gpus_allowed` are the GPU counts that the spec allows, or null if they are too many to list.
    `unprotected` is empty unless the run is running and lacks what it was given.
    `saves_by_holdfast` is false if the program has no Session, and null if that is not known yet.
    `refusals` has the reason for each action that the run would refuse now.
    """

    on_disk: bool
    failed_saves: list[FailedSave]
    noticed: list[Noticed]
    live_step: int | None
    step_s: float | None
    supervision: Supervision | None
    requests: list[OperatorRequest]
    steps_total: int | None
    gpus_min: int | None
    gpus_max: int | None
    gpus_fitting: list[int] | None
    gpus_allowed: list[int] | None
    saves_by_holdfast: bool | None
    unprotected: list[Unprotected]
    successor: WaitingSuccessor | None
    refusals: dict[str, str]
    crashes: list[Crash]
    trackers: list[TrackerRun]


class CheckpointDetail(durability.CheckpointRow):
    """One checkpoint, its manifest, its consumers, and the commands that continue from it."""

    on_disk: bool
    mirror: str | None
    has_mirror: bool
    manifest: dict[str, Any] | None
    manifest_files: list[reports.FileView]
    consumers: list[views.ConsumerView]
    commands: dict[str, str]


class Acknowledged(BaseModel):
    """Who acknowledged a problem, when, and with which note."""

    by: str
    at: str
    note: str = ""


class AttentionItem(BaseModel):
    """Something that needs a person: its cause, since when it is known, and what helps.

    `run` and `uid` are null for a problem of a root. `since` is null if only the present is known.
    `id` stays the same until the problem is solved, also over restarts of the server.
    """

    id: str
    run: str | None
    uid: str | None
    kind: str
    level: Literal["bad", "warn"]
    text: str
    since: str | None
    action: str
    acknowledged: Acknowledged | None


class WaitingRun(BaseModel):
    """A run whose job is pending, or that waits between two attempts.

    `since` is when the job was submitted, or when the last attempt ended. `starts_at` is Slurm's
    forecast. `gpus` is the size of the job, and null before the first one.
    """

    run: str
    uid: str
    state: str
    user: str
    partition: str | None
    gpus: int | None
    job_id: str | None
    since: str | None
    reason: str | None
    starts_at: str | None
    action: str


class NodeDetail(BaseModel):
    """The newest faults of a machine."""

    host: str
    faults: list[reports.NodeFault]


class RankRow(BaseModel):
    """One rank, from the newest heartbeat of its node."""

    rank: int
    node: int
    step: int
    phase: str
    age_s: float | None
    step_time_s: float
    step_p50_s: float
    step_p99_s: float
    own_s: float
    rss_bytes: int | None
    cpu_percent: float | None


class AttemptNode(BaseModel):
    """One node of an attempt; `age_s` is the age of its heartbeat by the server's clock."""

    node: int
    host: str
    time: str
    age_s: float
    launch: int
    memory_percent: float | None
    gpus: list[dict[str, Any]]
    ranks: list[RankRow]


class Heartbeats(BaseModel):
    """The nodes and ranks of an attempt, from the nodes' heartbeats."""

    run: str
    attempt: int | None
    nodes: list[AttemptNode]
    clock_problems: list[str]


class LogFile(BaseModel):
    """A log file: one output stream of one rank in one launch."""

    attempt: int
    node: str
    launch: int
    rank: int
    stream: str
    bytes: int


class LogPart(BaseModel):
    """A part of a log. The next part begins at `next_offset`, even if it is not written yet."""

    run: str
    attempt: int
    rank: int
    stream: str
    launch: int
    offset: int
    next_offset: int
    bytes: int
    text: str
    ended: bool = Field(description="true once the attempt has ended and the log is complete")


class LogKind(StrEnum):
    """The process that wrote a log file."""

    RANK = "rank"
    TORCHRUN = "torchrun"
    AGENT = "agent"
    FLUSHER = "flusher"
    SUPERVISOR = "supervisor"


class LogPlace(BaseModel):
    """A log file of a run. `file` is its path in the run's folder.

    What does not apply is null: an agent has no rank, and the supervisor no attempt.
    """

    file: str
    kind: LogKind
    attempt: int | None
    node: int | None
    launch: int | None
    rank: int | None
    stream: str | None


class RunLog(LogPlace):
    """A log file and its size; `changed_at` is Unix seconds."""

    bytes: int
    changed_at: float


class RunLogPart(BaseModel):
    """A part of a log file. The next part begins at `next_offset`, even if it is not written yet.

    `ended` is true once the attempt has ended and the log is complete.
    """

    run: str
    file: str
    offset: int
    next_offset: int
    bytes: int
    text: str
    ended: bool


class LogMatch(LogPlace):
    """A line that a search found, at the byte `offset`. Of a long line, a part is returned."""

    offset: int
    text: str


class LogSearch(BaseModel):
    """The lines that one request of a search found; `next` continues it, null at the end."""

    matches: list[LogMatch]
    next: str | None
    searched_bytes: int
    searched_files: int


class Verdict(BaseModel):
    """A checkpoint that a prune keeps or deletes, and the reason."""

    checkpoint: str
    step: int
    bytes: int
    reason: str


class Prune(BaseModel):
    """The output of `holdfast prune --json`."""

    run: str
    dry_run: bool
    deleted: list[Verdict]
    kept: list[Verdict]
    bytes_deleted: int
    bytes_kept: int


class Capacity(BaseModel):
    """The GPUs that are free now for the attempts of a run, at its first choice of resources.

    `gpus_free` is null if they are not limited, or if the scheduler did not answer: `problem` is
    the reason then. `where` names the partition, or the executor.
    """

    gpus_free: int | None
    where: str
    problem: str | None


class ActionDone(BaseModel):
    """A recorded operator request; `message` explains what happens next."""

    run: str
    action: str
    gpus: int | None
    message: str
    state: str
    flow_run: str | None = None
    url: str | None = None
    pid: int | None = None


class Pinned(BaseModel):
    """The new pin state of a checkpoint."""

    checkpoint: str
    pinned: bool


class AnnotationDone(BaseModel):
    """The tags and the note of a run, or of its `checkpoint`, after a change."""

    run: str
    checkpoint: str | None
    tags: list[str]
    note: str | None
    note_by: str | None
    note_at: str | None


class Reported(BaseModel):
    """Metrics that were recorded for a checkpoint."""

    checkpoint: str
    metrics: dict[str, float | str]


class Forked(BaseModel):
    """A new run that was forked from a checkpoint."""

    run: str
    uid: str
    directory: str
    forked_from: str
    flow_run: str | None = None
    url: str | None = None
    pid: int | None = None


class JobRow(BaseModel):
    """A background job, such as a verification or an export.

    `result` is set once `state` is `done`. `created_at` and `ended_at` are Unix seconds.
    """

    id: str
    kind: str
    about: str
    by: str
    state: Literal["waiting", "running", "done", "failed"]
    done_bytes: int
    total_bytes: int | None
    result: dict[str, Any] | None
    error: str | None
    created_at: float
    ended_at: float | None


class Body(BaseModel):
    """The base of all request bodies. An unknown key and a value of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LogIn(Body):
    """The token to log in with."""

    token: Annotated[str, Field(max_length=TOKEN_CHARACTERS_MAX)]


class Ask(Body):
    """An operator's request. With `force`, it is sent even while another one is pending."""

    force: bool = False


class AskRelaunch(Ask):
    """Continue in a new attempt, with `gpus` GPUs if given."""

    gpus: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class AskCancel(Ask):
    """Cancel a run. With `now`, it ends without a last checkpoint."""

    now: bool = False


class AskAcknowledge(Body):
    """Acknowledge the problem `id` of the list of what needs attention."""

    id: Annotated[str, Field(min_length=1, max_length=5000, pattern=r"^[^\x00]*$")]
    note: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] = ""


class AskPin(Body):
    """Pin a checkpoint; `note` is the recorded reason."""

    note: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] = ""


class AskAnnotate(Body):
    """Change tags and the note. Without `note`, it stays as it is. An empty one removes it."""

    add: Annotated[list[Tag], Field(max_length=TAGS_MAX)] = []
    remove: Annotated[list[Tag], Field(max_length=TAGS_MAX)] = []
    note: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] = ""


class AskMetrics(Body):
    """Metrics of a checkpoint by name. What is not finite is text: `nan`, `inf` or `-inf`."""

    metrics: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=200)],
            Annotated[float, Field(allow_inf_nan=False)] | Literal["nan", "inf", "-inf"],
        ],
        Field(min_length=1, max_length=1000),
    ]


class AskFork(Body):
    """The name of the new run and its spec overrides (key to value, as with `--set`)."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    set: dict[Annotated[str, Field(max_length=100)], int | float | bool | str] = {}


class AskExport(Body):
    """The export format. `include` selects keys by prefix; `dtype` converts floating-point data."""

    to: Annotated[exports.ExportFormat, Field(strict=False)]
    include: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]{0,199}$")]],
        Field(max_length=50),
    ] = []
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None


class AskPrune(Body):
    """Prune a run. Nothing is deleted unless `dry_run` is false."""

    dry_run: bool = True


class Empty(Body):
    """An empty request body."""
