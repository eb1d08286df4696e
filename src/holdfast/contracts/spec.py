"""`RunSpec`: what a person asks for, validated on construction and frozen after it.

A spec says what to run and within which bounds. It never says where a run stands: that is on
disk (`history`). The digest of the spec is the identity that re-attachment compares.
"""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, ValidationInfo, field_validator, model_validator

from holdfast.contracts.bounds import INTEGER_MAX, SECONDS_MAX
from holdfast.contracts.digests import document_digest
from holdfast.contracts.mirrors import problem_with_mirror
from holdfast.contracts.paths import RUN_NAME
from holdfast.contracts.secrets import EnvironmentValue, SecretReference
from holdfast.contracts.slurm_options import problem_with_option
from holdfast.contracts.spec_part import SpecPart, is_recorded
from holdfast.contracts.states import Cause

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGTP]?)(i?)B")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PLAIN_HTTP = re.compile(r"http://[^\s/:@]+(:[0-9]{1,5})?(/[^\s?#]*)?")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Launch(SpecPart):
    """How the program is started on a node."""

    python: str = Field(
        default="", description="interpreter of the job's environment; empty: the agent's own"
    )
    setup: tuple[str, ...] = Field(
        default=(), description="shell lines run before the program, such as `module load cuda`"
    )
    container: tuple[str, ...] = Field(
        default=(), description="srun arguments that choose a container, such as --container-image"
    )
    srun: tuple[str, ...] = Field(default=(), description="further arguments for srun")
    working_directory: str = Field(
        default=".", description="where the program runs; relative to the spec's own folder"
    )
    code: Literal["in_place", "snapshot"] = Field(
        default="in_place", description="run the code where it lies, or from a copy in the run"
    )

    @field_validator("container", "srun")
    @classmethod
    def _one_component(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        several = [word for word in value if word.startswith(("--het-group", "--pack-group"))]
        if several and not is_recorded(info):
            raise ValueError(
                f"{several[0]!r}: expected a job of equal nodes; Holdfast starts no heterogeneous "
                "jobs, so leave the option out"
            )
        return value


class Resources(SpecPart):
    """What the first attempt asks for."""

    executor: Literal["local", "slurm"] = "local"
    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="ranks per node; on a machine without GPUs these are CPU ranks"
    )
    cpus_per_gpu: Annotated[int, Field(ge=1)] | None = None
    memory_gb_per_node: Annotated[float, Field(gt=0)] | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit_min: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="minutes; None leaves it to the partition"
    )
    gres: str | None = Field(
        default=None, description="Slurm GRES for each node instead of gpu:<gpus_per_node>"
    )
    extra: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description="further sbatch options by their long names, such as reservation or nodelist; "
        "those that Holdfast sets by itself are refused",
    )

    @field_validator("extra")
    @classmethod
    def _options_are_not_holdfasts(
        cls, value: dict[str, str | int | bool], info: ValidationInfo
    ) -> dict[str, str | int | bool]:
        problems = [problem for name in value if (problem := problem_with_option(name))]
        if problems and not is_recorded(info):
            raise ValueError("; ".join(problems))
        return value


class Elastic(SpecPart):
    """The GPU counts that a relaunch may use."""

    min_gpus: Annotated[int, Field(ge=1)] | None = None
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    choices: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="allowed counts; empty: all that the nodes can be cut into"
    )
    on_preemption: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="GPU counts after the 1st, 2nd, … preemption; the last one repeats",
    )
    grow: bool = Field(
        default=False,
        description="save, stop and go on at more GPUs when a running attempt could have them",
    )
    grow_after_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="seconds that GPUs must have been free before that"
    )


class KeepBest(SpecPart):
    """The checkpoints whose logged metric was best; one without the metric is not among them."""

    metric: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    mode: Literal["min", "max"] = "min"


class Keep(SpecPart):
    """Which committed checkpoints are kept; see `contracts.keep_rules` for what each key does.

    Without any key all are. Pins, what is in use or being read, and the newest always are.
    """

    last: Annotated[int, Field(ge=1)] | None = None
    best: KeepBest | None = None
    every_steps: Annotated[int, Field(ge=1)] | None = None
    every_hours: Annotated[float, Field(gt=0)] | None = None
    ttl: str | None = Field(
        default=None, description="how long what no other rule keeps may stay: `12h`, `7d`"
    )

    @field_validator("ttl")
    @classmethod
    def _ttl_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None and not _seconds(value):
            raise ValueError(f"{value!r}: expected a time to live such as '12h' or '7d'")
        return value

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds."""
        return _seconds(self.ttl) if self.ttl else None

    @property
    def is_limited(self) -> bool:
        """True when any rule is given: what none of them keeps is then deleted."""
        rules = (self.last, self.best, self.every_steps, self.every_hours, self.ttl)
        return any(rule is not None for rule in rules)


class Checkpointing(SpecPart):
    """When a checkpoint is taken and which are kept."""

    interval: StrictInt | str = Field(
        default="auto", description="steps (50), seconds (`300s`, `10m`, `1h`) or `auto`"
    )
    keep: Keep = Keep()
    budget: Annotated[StrictInt, Field(ge=1)] | str | None = Field(
        default=None, description="most bytes that the run's checkpoints may take (`500GB`)"
    )
    mirror: str | None = Field(
        default=None,
        description="where every checkpoint is copied to: an fsspec URL such as s3://bucket/prefix "
        "or file:///shared/directory; credentials come by environment, never from here",
    )
    local: str | None = Field(
        default=None,
        description="a directory on the node's own disk that files are written to first; the "
        "mirror then holds what counts",
    )
    snapshots: Annotated[StrictInt, Field(ge=1)] | Literal["auto", "off"] = Field(
        default="auto",
        description="steps between copies in memory, which a crash of the program does not lose",
    )
    staging: Literal["memory"] = Field(
        default="memory", description="where a step is staged before it is written"
    )

    @field_validator("interval")
    @classmethod
    def _interval_is_known(cls, value: int | str) -> int | str:
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"{value} steps: expected 1 or more")
        elif value != "auto" and not _seconds(value):
            raise ValueError(
                f"{value!r}: expected steps (50), seconds ('300s', '10m', more than 0) or 'auto'"
            )
        return value

    @field_validator("budget")
    @classmethod
    def _budget_is_a_size(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not _size_bytes(value):
            raise ValueError(f"{value!r}: expected bytes, or a size such as '500GB' or '2TiB'")
        return value

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return _size_bytes(self.budget) if isinstance(self.budget, str) else self.budget

    @field_validator("mirror")
    @classmethod
    def _mirror_is_a_location(cls, value: str | None) -> str | None:
        if value is not None and (problem := problem_with_mirror(value)):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _local_needs_a_mirror(self) -> Checkpointing:
        if self.local is not None and not self.local.startswith("/"):
            raise ValueError(f"local {self.local!r}: expected an absolute path on the nodes")
        if self.local is not None and self.mirror is None:
            raise ValueError(
                "local without mirror: what lies on one node's disk alone is lost with the node; "
                "give checkpoint.mirror as well"
            )
        return self

    @property
    def interval_steps(self) -> int | None:
        """The interval in steps, when that is how it was given."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds, when that is how it was given."""
        return _seconds(str(self.interval))


SilentPhase = Literal[
    "start", "rendezvous", "load", "compile", "train", "eval", "save", "stop", "done"
]


NumericsAction = Literal["stop", "skip", "rollback", "warn"]


class Numerics(SpecPart):
    """What is done about a loss that is not finite, or far above what it was."""

    on_nan: NumericsAction = Field(
        default="stop", description="after a loss that is NaN or infinite"
    )
    on_spike: NumericsAction = Field(default="warn", description="after a loss above the limit")
    metric: str = Field(default="loss", description="the logged metric that is watched")
    window: Annotated[int, Field(ge=8)] = Field(
        default=100, description="losses that the limit is computed from"
    )
    spike_mads: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        description="the limit: so many median absolute deviations above the window's median",
    )
    margin_steps: Annotated[int, Field(ge=1)] = Field(
        default=10, description="steps that lie at least between a rollback's target and the loss"
    )
    skip_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="steps of data passed over: around the loss by a rollback, after it by a skip",
    )
    changes_max: Annotated[int, Field(ge=0)] = Field(
        default=5, description="rollbacks and skips of a run, until an operator relaunches it"
    )


class Supervision(SpecPart):
    """How an attempt is watched, and how often each cause is forgiven."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 2.0
    poll_s: Annotated[float, Field(gt=0)] = 5.0
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="seconds between a preemption signal and the kill"
    )
    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        default="auto", description="whose interruption notices the nodes listen for"
    )
    notices_url: str = Field(
        default="", description="where they are served instead of the cloud's own address"
    )
    flush_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="the longest that a stop without a deadline, or a save, may take",
    )
    join_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0, description="the longest that node 0 and the other nodes wait to meet"
    )
    ports: str = Field(
        default="any",
        pattern=r"^(any|\d{1,5}-\d{1,5})$",
        description="ports between nodes, for the agents and for torchrun, as 40000-40063",
    )
    restarts_in_place: Annotated[int, Field(ge=0)] = Field(
        default=3, description="restarts of torchrun inside one attempt"
    )
    standby_after_s: Annotated[float, Field(ge=0)] | Literal["off"] = Field(
        default=3.0,
        description="seconds of training after which a second torchrun loads and then waits",
    )
    hangs: bool = Field(default=True, description="whether silent ranks are looked into and ended")
    silence_s: dict[SilentPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="silence per phase before which nothing is ended; see `workers.agent.silence`",
    )
    numerics: Numerics = Numerics()
    budgets: dict[Cause, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="relaunches forgiven per cause; see `workers.policy`"
    )
    backoff_s: Annotated[float, Field(ge=0)] = 10.0
    attempts_max: Annotated[int, Field(ge=1)] = 1000

    @field_validator("notices_url")
    @classmethod
    def _notices_url_is_plain_http(cls, value: str) -> str:
        if value and not _PLAIN_HTTP.fullmatch(value):
            raise ValueError(f"{value!r}: expected an address such as http://169.254.169.254")
        return value

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str) -> str:
        if value != "any":
            first, last = map(int, value.split("-"))
            if not 1 <= first <= last <= 65535:
                raise ValueError(f"ports {value!r}: expected first-last within 1 to 65535")
        return value

    @property
    def port_range(self) -> range | None:
        """The ports that nodes may use between them; None for any."""
        if self.ports == "any":
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)


class Cost(SpecPart):
    """Prices, for the accounts."""

    gpu_hour: Annotated[float, Field(ge=0)] | None = None
    on_demand_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="the price without preemptions, to compare with"
    )
    currency: str = "USD"


class RunSpec(SpecPart):
    """One training job a person cares about, from first step to last.

    `command` is the program's own argv for torchrun: a script and its arguments, or `-m` and a
    module. `config` is the program's business: it reaches it unread (`holdfast.trainer.config`).
    """

    name: str
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    environment: dict[str, EnvironmentValue] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    launch: Launch = Launch()
    resources: Resources = Resources()
    elastic: Elastic = Elastic()
    checkpoint: Checkpointing = Checkpointing()
    supervision: Supervision = Supervision()
    cost: Cost = Cost()

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value) or "." in value:
            raise ValueError(
                f"{value[:120]!r}: expected up to 100 letters, digits, '-' and '_', beginning "
                "with a letter or digit"
            )
        return value

    @field_validator("environment")
    @classmethod
    def _environment_names_are_names(
        cls, value: dict[str, str | SecretReference]
    ) -> dict[str, str | SecretReference]:
        wrong = [name for name in value if not _ENVIRONMENT_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong}: expected names such as OMP_NUM_THREADS")
        return value

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> RunSpec:
        low, high = self.gpus_min, self.gpus_max
        if low > high:
            raise ValueError(
                f"elastic.min_gpus {low} is above elastic.max_gpus {high}; the one that was not "
                "given is the smallest or largest of all counts in the spec"
            )
        if self.resources.executor == "local" and self.resources.nodes > 1:
            raise ValueError("the local executor has one node; give resources.nodes = 1")
        for count in (self.gpus, *self.elastic.choices, *self.elastic.on_preemption):
            if not low <= count <= high:
                raise ValueError(f"{count} GPUs lie outside elastic {low} to {high}")
            split_gpus(count, self.resources.gpus_per_node)
        return self

    @property
    def gpus(self) -> int:
        """GPUs (ranks) of the first attempt."""
        return self.resources.nodes * self.resources.gpus_per_node

    @property
    def gpus_min(self) -> int:
        """The fewest GPUs that a relaunch may use; the first attempt's count unless given."""
        smallest = min((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.min_gpus or smallest

    @property
    def gpus_max(self) -> int:
        """The most GPUs that a relaunch may use; the first attempt's count unless given."""
        largest = max((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.max_gpus or largest

    @property
    def given(self) -> dict[str, Any]:
        """The keys that a person gave, without any default."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def digest(self) -> str:
        """SHA-256 of the whole spec with its defaults, as this version of Holdfast has them."""
        return document_digest(self.model_dump(mode="json"))


def _seconds(text: str) -> float | None:
    """A duration such as `10m`; None for anything else, and for more than 30 years."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else inf
    return seconds if seconds <= SECONDS_MAX else None


def _size_bytes(text: str) -> int | None:
    """`500GB` in powers of 1000, `500GiB` in powers of 1024; None for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    size = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return int(size) if size <= INTEGER_MAX else None


def split_gpus(gpus: int, gpus_per_node: int) -> tuple[int, int]:
    """(nodes, GPUs per node) for `gpus` on nodes that have `gpus_per_node` each.

    Raises `ValueError` when they do not fill whole nodes.
    """
    if gpus <= gpus_per_node:
        return 1, gpus
    nodes, rest = divmod(gpus, gpus_per_node)
    if rest:
        raise ValueError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node}: expected {gpus_per_node} or fewer, "
            f"or a multiple of {gpus_per_node}"
        )
    return nodes, gpus_per_node
