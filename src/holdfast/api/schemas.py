"""What the API takes and answers, beside `lineage.views`.

Times are ISO-8601 in UTC, durations seconds, sizes bytes, unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from holdfast.api.tokens import Role
from holdfast.lineage import durability, reports, views
from holdfast.workers import exports

TOKEN_CHARACTERS_MAX: Final = 200

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """Some rows, and the cursor of those after them; null when there are no more."""

    items: list[T]
    next: str | None


class Problem(BaseModel):
    """Every answer that is an error: a word for programs and a sentence for people."""

    status: int
    code: str
    message: str
    problems: list[str] = []
    by: str | None = Field(default=None, description="409: whose request is under way")
    action: str | None = Field(default=None, description="409: what was asked for")
    at: float | None = Field(default=None, description="409: when, in Unix seconds")


class Session(BaseModel):
    """Who asks, and what a page must know to log in or to change something."""

    name: str | None = Field(description="null for a stranger, who must log in")
    role: Role | None
    csrf: str | None = Field(description="to be sent as X-Holdfast-CSRF with each change")
    version: str


class Health(BaseModel):
    """Whether the server can do its work."""

    ok: bool
    version: str
    database: str
    ingest_lag_s: float | None
    round_s: float
    streams: int
    roots: dict[str, bool]
    problems: dict[str, str]


class Noticed(BaseModel):
    """What a watch over ranks and nodes noticed; `at` is Unix seconds."""

    kind: str
    attempt: int | None
    at: float
    text: str
    dumps: list[str]


class FailedSave(BaseModel):
    """A save that was not committed; `at` is Unix seconds."""

    checkpoint: str
    step: int
    error: str
    at: float


class OperatorRequest(BaseModel):
    """What an operator asked of a run. `at` is Unix seconds.

    `after_attempt` is the newest attempt at that time, 0 before the first one.
    """

    action: str
    by: str
    at: float
    gpus: int | None
    after_attempt: int


class Supervision(BaseModel):
    """Who supervises a live run.

    `is_alive` is false when no process holds the run's lock, and null while one may be starting.
    `host` and `pid` are those of the newest supervisor; its lock may be invisible from another
    host, as `is_remote` says.
    """

    is_alive: bool | None
    is_remote: bool
    host: str | None
    pid: int | None


class RunLine(views.RunRow):
    """A line of the list of runs; a live one's newest step, and the seconds that a step takes."""

    live_step: int | None
    step_s: float | None


class UnreadableRun(BaseModel):
    """A folder under a root that is a run's, and why it cannot be read."""

    run: str
    path: str
    reason: str


class RunPage(Page[RunLine]):
    """Some runs. The first page also lists the folders of runs that cannot be read.

    Nothing is known of those but their names, so they are listed only where neither states nor
    times are asked for. One that was readable before is among the items too, as it was then.
    """

    unreadable: list[UnreadableRun] = []


class RunDetail(views.RunView):
    """`holdfast show RUN --json`, and where the live attempt is; `steps_total` where known."""

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


class CheckpointRow(views.CheckpointView, durability.DurabilityStatus):
    """A line of `holdfast checkpoints RUN`, and whether the checkpoint was read back and copied."""


class CheckpointDetail(CheckpointRow):
    """One checkpoint, what its manifest says, and how to continue from it."""

    on_disk: bool
    mirror: str | None
    has_mirror: bool
    manifest: dict[str, Any] | None
    manifest_files: list[reports.FileView]
    commands: dict[str, str]


class NodeDetail(BaseModel):
    """A machine's newest faults."""

    host: str
    faults: list[reports.NodeFault]


class RankRow(BaseModel):
    """One rank as its node's agent last saw it."""

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
    """One node of an attempt; `age_s` is seconds since its heartbeat, by this machine's clock."""

    node: int
    host: str
    time: str
    age_s: float
    launch: int
    memory_percent: float | None
    gpus: list[dict[str, Any]]
    ranks: list[RankRow]


class Heartbeats(BaseModel):
    """The nodes and ranks of an attempt, the newest unless one is asked for."""

    run: str
    attempt: int | None
    nodes: list[AttemptNode]
    clock_problems: list[str]


class LogFile(BaseModel):
    """The output of one rank in one launch."""

    attempt: int
    node: str
    launch: int
    rank: int
    stream: str
    bytes: int


class LogPart(BaseModel):
    """A stretch of a log. `next_offset` is where the next one begins, also when none came yet."""

    run: str
    attempt: int
    rank: int
    stream: str
    launch: int
    offset: int
    next_offset: int
    bytes: int
    text: str
    ended: bool = Field(description="nothing will be added any more")


class Verdict(BaseModel):
    """What becomes of a checkpoint at the next prune, and why."""

    checkpoint: str
    step: int
    bytes: int
    reason: str


class Prune(BaseModel):
    """`holdfast prune --json`."""

    run: str
    dry_run: bool
    deleted: list[Verdict]
    kept: list[Verdict]
    bytes_deleted: int
    bytes_kept: int


class ActionDone(BaseModel):
    """An operator's request was recorded; `message` says what happens now."""

    run: str
    action: str
    gpus: int | None
    message: str
    state: str
    flow_run: str | None = None
    url: str | None = None
    pid: int | None = None


class Pinned(BaseModel):
    """A checkpoint's pin was changed."""

    checkpoint: str
    pinned: bool


class Forked(BaseModel):
    """A new run began from a checkpoint."""

    run: str
    uid: str
    directory: str
    forked_from: str
    flow_run: str | None = None
    url: str | None = None
    pid: int | None = None


class JobRow(BaseModel):
    """An action that takes a while; `result` is there once `state` is `done`."""

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
    """What a request brings; a key that nobody knows is an error."""

    model_config = ConfigDict(extra="forbid")


class LogIn(Body):
    """A token, for a session of the page."""

    token: Annotated[str, Field(max_length=TOKEN_CHARACTERS_MAX)]


class Ask(Body):
    """An operator's word; with `force` also while another one's is under way."""

    force: bool = False


class AskRelaunch(Ask):
    """Go on in a new attempt, at `gpus` if given."""

    gpus: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class AskPin(Body):
    """Why a checkpoint is kept, for the records."""

    note: Annotated[str, Field(max_length=2000)] = ""


class AskFork(Body):
    """A new run's name, and what of its spec differs (`key` to value, as `--set`)."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    set: dict[Annotated[str, Field(max_length=100)], int | float | bool | str] = {}


class AskExport(Body):
    """The form to write; `include` takes keys by their beginnings, `dtype` converts floats."""

    to: exports.Form
    include: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]{0,199}$")]],
        Field(max_length=50),
    ] = []
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None


class AskPrune(Body):
    """Delete what nothing keeps; nothing is deleted unless `dry_run` is false."""

    dry_run: bool = True


class Empty(Body):
    """No parameters."""
