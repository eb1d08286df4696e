"""`RunSpec`: the description of a run, validated on construction and then frozen.

A spec defines what to run and within which limits. It does not contain the state of a run, which
is on disk (`history`). A supervisor compares the spec's digest to recognise its run.
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
    """How a node starts the program."""

    python: str = Field(
        default="", description="Python interpreter of the job. Empty: the agent's own"
    )
    setup: tuple[str, ...] = Field(
        default=(), description="shell lines to run first, such as `module load cuda`"
    )
    container: tuple[str, ...] = Field(
        default=(), description="srun arguments that select a container, such as --container-image"
    )
    srun: tuple[str, ...] = Field(default=(), description="further srun arguments")
    working_directory: str = Field(
        default=".", description="working directory, relative to the folder of the spec"
    )
    code: Literal["in_place", "snapshot"] = Field(
        default="in_place", description="run the code where it is, or a copy of it in the run"
    )

    @field_validator("container", "srun")
    @classmethod
    def _one_component(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        several = [option for option in value if option.startswith(("--het-group", "--pack-group"))]
        if several and not is_recorded(info):
            raise ValueError(
                f"{several[0]!r}: Holdfast does not start heterogeneous jobs; leave the option out"
            )
        return value


class Resources(SpecPart):
    """The resources of the first attempt."""

    executor: Literal["local", "slurm"] = "local"
    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="ranks per node. On a machine without GPUs, these are CPU ranks"
    )
    cpus_per_gpu: Annotated[int, Field(ge=1)] | None = None
    memory_gb_per_node: Annotated[float, Field(gt=0)] | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit_min: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="time limit of one attempt in minutes. None: the partition's"
    )
    gres: str | None = Field(
        default=None, description="Slurm GRES of each node, instead of gpu:<gpus_per_node>"
    )
    extra: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description="further sbatch options by their long names, such as reservation or nodelist. "
        "Options that Holdfast sets itself are refused",
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
        default=(), description="allowed counts. Empty: all counts that fill nodes"
    )
    on_preemption: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="GPU counts after the 1st, 2nd, … preemption. The last one repeats",
    )
    grow: bool = Field(
        default=False,
        description="if more GPUs become free, save, stop and relaunch with them",
    )
    grow_after_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="seconds for which more GPUs must have been free"
    )


class KeepBest(SpecPart):
    """The checkpoints with the best logged metric. One without the metric does not count."""

    metric: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    mode: Literal["min", "max"] = "min"


class Keep(SpecPart):
    """The rules for which committed checkpoints are kept, see `contracts.keep_rules`.

    Without any key, all checkpoints are kept. Pinned checkpoints, those in use or being read, and
    the newest one are always kept.
    """

    last: Annotated[int, Field(ge=1)] | None = None
    best: KeepBest | None = None
    every_steps: Annotated[int, Field(ge=1)] | None = None
    every_hours: Annotated[float, Field(gt=0)] | None = None
    ttl: str | None = Field(
        default=None, description="keep every checkpoint that is younger: `12h`, `7d`"
    )

    @field_validator("ttl")
    @classmethod
    def _ttl_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None and not _seconds(value):
            raise ValueError(f"{value!r}: expected a duration such as '12h' or '7d'")
        return value

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds."""
        return _seconds(self.ttl) if self.ttl else None

    @property
    def is_limited(self) -> bool:
        """True when a rule is given. Checkpoints that no rule keeps are then deleted."""
        rules = (self.last, self.best, self.every_steps, self.every_hours, self.ttl)
        return any(rule is not None for rule in rules)


class Checkpointing(SpecPart):
    """When the run saves, where its checkpoints go and which of them are kept."""

    interval: StrictInt | str = Field(
        default="auto", description="steps (50), time (`300s`, `10m`, `1h`) or `auto`"
    )
    keep: Keep = Keep()
    budget: Annotated[StrictInt, Field(ge=1)] | str | None = Field(
        default=None, description="most space that the run's checkpoints may take (`500GB`)"
    )
    mirror: str | None = Field(
        default=None,
        description="fsspec URL that every checkpoint is copied to, such as s3://bucket/prefix or "
        "file:///shared/directory. Set credentials in the environment",
    )
    local: str | None = Field(
        default=None,
        description="directory on each node's own disk that files are written to first. The "
        "mirror then holds the durable copy",
    )
    snapshots: Annotated[StrictInt, Field(ge=1)] | Literal["auto", "off"] = Field(
        default="auto",
        description="steps between copies in memory, which survive a crash of the program",
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
                f"{value!r}: expected steps (50), a time above 0 ('300s', '10m') or 'auto'"
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
                "checkpoint.local is set without checkpoint.mirror: files on a node's disk are "
                "lost with the node; set checkpoint.mirror too"
            )
        return self

    @property
    def interval_steps(self) -> int | None:
        """The interval in steps; None unless it was given in steps."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds; None unless it was given as a time."""
        return _seconds(str(self.interval))


SilentPhase = Literal[
    "start", "rendezvous", "load", "compile", "train", "eval", "save", "stop", "done"
]


NumericsAction = Literal["stop", "skip", "rollback", "warn"]


class Numerics(SpecPart):
    """The action after a loss that is not finite, or is far above the losses before it."""

    on_nan: NumericsAction = Field(
        default="stop", description="action after a loss that is NaN or infinite"
    )
    on_spike: NumericsAction = Field(
        default="warn", description="action after a loss above the limit"
    )
    metric: str = Field(default="loss", description="logged metric to watch")
    window: Annotated[int, Field(ge=8)] = Field(
        default=100, description="number of losses that the limit is computed from"
    )
    spike_mads: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        description="the limit, as median absolute deviations above the window's median",
    )
    margin_steps: Annotated[int, Field(ge=1)] = Field(
        default=10, description="least number of steps between a rollback's target and the loss"
    )
    skip_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="steps of data to skip: around the loss in a rollback, after it in a skip",
    )
    changes_max: Annotated[int, Field(ge=0)] = Field(
        default=5, description="most rollbacks and skips of a run until an operator relaunches it"
    )


class Supervision(SpecPart):
    """How Holdfast watches an attempt, and how often it relaunches after each cause."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 2.0
    poll_s: Annotated[float, Field(gt=0)] = 5.0
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="seconds between the signal of a preemption and the kill"
    )
    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        default="auto", description="cloud whose interruption notices the nodes listen for"
    )
    notices_url: str = Field(
        default="", description="address of the notices. Empty: the cloud's own"
    )
    flush_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="longest time that a save, or a stop without a deadline, may take",
    )
    join_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0, description="longest time that the nodes of a job wait for each other"
    )
    ports: str = Field(
        default="any",
        pattern=r"^(any|\d{1,5}-\d{1,5})$",
        description="ports between nodes, for the agents and torchrun, such as 40000-40063",
    )
    restarts_in_place: Annotated[int, Field(ge=0)] = Field(
        default=3, description="restarts of torchrun inside one attempt"
    )
    standby_after_s: Annotated[float, Field(ge=0)] | Literal["off"] = Field(
        default=3.0,
        description="seconds of training after which the warm standby starts",
    )
    hangs: bool = Field(default=True, description="examine silent ranks and end those that hang")
    silence_s: dict[SilentPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="seconds of silence per phase before a rank may be ended, see "
        "`workers.agent.silence`",
    )
    numerics: Numerics = Numerics()
    budgets: dict[Cause, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="relaunches allowed per cause, see `workers.policy`"
    )
    backoff_s: Annotated[float, Field(ge=0)] = 10.0
    attempts_max: Annotated[int, Field(ge=1)] = 1000

    @field_validator("notices_url")
    @classmethod
    def _notices_url_is_plain_http(cls, value: str) -> str:
        if value and not _PLAIN_HTTP.fullmatch(value):
            raise ValueError(f"{value!r}: expected an HTTP address such as http://169.254.169.254")
        return value

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str) -> str:
        if value != "any":
            first, last = map(int, value.split("-"))
            if not 1 <= first <= last <= 65535:
                raise ValueError(f"ports {value!r}: expected FIRST-LAST between 1 and 65535")
        return value

    @property
    def port_range(self) -> range | None:
        """The ports that nodes may use to reach each other; None for any."""
        if self.ports == "any":
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)


class Cost(SpecPart):
    """Prices of GPU time."""

    gpu_hour: Annotated[float, Field(ge=0)] | None = None
    on_demand_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price of a GPU hour that is never preempted, for comparison"
    )
    currency: str = "USD"


class RunSpec(SpecPart):
    """One training job, from its first step to its last.

    `command` holds the arguments for torchrun: a script and its arguments, or `-m` and a module.
    The program gets `config` unchanged, as `holdfast.trainer.config`.
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
                f"{value[:120]!r}: expected up to 100 letters, digits, '-' and '_', starting "
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
                f"elastic.min_gpus {low} is above elastic.max_gpus {high}; the default of each is "
                "the smallest or largest GPU count in the spec"
            )
        if self.resources.executor == "local" and self.resources.nodes > 1:
            raise ValueError("the local executor has one node; set resources.nodes = 1")
        for count in (self.gpus, *self.elastic.choices, *self.elastic.on_preemption):
            if not low <= count <= high:
                raise ValueError(f"{count} GPUs lie outside elastic {low} to {high}")
            split_gpus(count, self.resources.gpus_per_node)
        return self

    @property
    def gpus(self) -> int:
        """The number of GPUs (ranks) of the first attempt."""
        return self.resources.nodes * self.resources.gpus_per_node

    @property
    def gpus_min(self) -> int:
        """The fewest GPUs that a relaunch may use; by default the smallest count in the spec."""
        smallest = min((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.min_gpus or smallest

    @property
    def gpus_max(self) -> int:
        """The most GPUs that a relaunch may use; by default the largest count in the spec."""
        largest = max((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.max_gpus or largest

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the user gave, without the defaults."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def digest(self) -> str:
        """SHA-256 of the whole spec, with the defaults of this version of Holdfast."""
        return document_digest(self.model_dump(mode="json"))


def _seconds(text: str) -> float | None:
    """Return a duration such as `10m` in seconds; None if invalid or longer than 30 years."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else inf
    return seconds if seconds <= SECONDS_MAX else None


def _size_bytes(text: str) -> int | None:
    """Return a size in bytes; None if invalid. `GB` is a power of 1000, `GiB` of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    size = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return int(size) if size <= INTEGER_MAX else None


def split_gpus(gpus: int, gpus_per_node: int) -> tuple[int, int]:
    """Return (nodes, GPUs per node) for `gpus` on nodes that have `gpus_per_node` each.

    Raises `ValueError` when the GPUs do not fill whole nodes.
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
