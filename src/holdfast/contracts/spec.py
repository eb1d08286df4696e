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
from holdfast.contracts.spec_supervision import Supervision

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGTP]?)(i?)B")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Launch(SpecPart):
    """How a node starts the program."""

    python: str = Field(
        default="",
        description="Python interpreter of the job's environment. Empty: that of the agent",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="shell lines to run before the program, such as `module load cuda`"
    )
    container: tuple[str, ...] = Field(
        default=(),
        description="srun arguments that select a container, such as `--container-image`",
    )
    srun: tuple[str, ...] = Field(
        default=(),
        description="further srun arguments. Options for heterogeneous jobs (`--het-group`) are "
        "refused",
    )
    working_directory: str = Field(
        default=".",
        description="working directory of the program, relative to the folder of the spec",
    )
    code: Literal["in_place", "snapshot"] = Field(
        default="in_place",
        description="`in_place` runs the code where it is. `snapshot` copies the working "
        "directory into the run, at most 512 MiB, and runs the copy. It copies the "
        "files that git tracks, or all files except caches where there is no git",
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

    executor: Literal["local", "slurm"] = Field(
        default="local", description="`local` runs on this machine, `slurm` submits to Slurm"
    )
    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="number of nodes. The local executor has one"
    )
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="ranks per node. On a machine without GPUs, these are CPU ranks"
    )
    cpus_per_gpu: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="CPU cores per rank. None: Slurm's default"
    )
    memory_gb_per_node: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="memory per node. None: Slurm's default"
    )
    partition: str | None = Field(
        default=None, description="Slurm partition. None: Slurm's default"
    )
    account: str | None = Field(default=None, description="Slurm account. None: Slurm's default")
    qos: str | None = Field(default=None, description="Slurm QOS. None: Slurm's default")
    constraint: str | None = Field(default=None, description="node features that Slurm requires")
    time_limit_min: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="time limit of one attempt. None: that of the partition"
    )
    gres: str | None = Field(
        default=None,
        description="GRES of each node instead of `gpu:<gpus_per_node>`. `none` requests no GRES",
    )
    extra: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description="further sbatch options by their long names, such as `reservation` or "
        "`nodelist`. Options that Holdfast sets itself are refused, with the key to "
        "use instead",
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

    min_gpus: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="fewest GPUs that a relaunch may use. None: the smallest count in the spec",
    )
    max_gpus: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="most GPUs that a relaunch may use. None: the largest count in the spec",
    )
    choices: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="allowed counts. Empty: every count from `min_gpus` to `max_gpus` that is "
        "at most `gpus_per_node` or a multiple of it",
    )
    on_preemption: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="counts after the 1st, 2nd, … preemption. The last one repeats"
    )
    grow: bool = Field(
        default=False,
        description="if more GPUs become free while an attempt runs, save, stop and relaunch "
        "with them. Only Slurm reports free GPUs",
    )
    grow_after_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="seconds for which the GPUs must have been free, and for which the attempt "
        "must have run. It doubles each time a grown attempt is preempted, up to 32 "
        "times the value",
    )


class KeepBest(SpecPart):
    """The checkpoints with the best logged metric. One without the metric does not count."""

    metric: Annotated[str, Field(min_length=1)] = Field(description="metric that the program logs")
    n: Annotated[int, Field(ge=1)] = Field(default=1, description="number of checkpoints")
    mode: Literal["min", "max"] = Field(
        default="min", description="whether the smallest or the largest value is the best"
    )


class Keep(SpecPart):
    """The rules for which committed checkpoints are kept, see `contracts.keep_rules`.

    Without any key, all checkpoints are kept. Pinned checkpoints, those in use or being read, and
    the newest one are always kept.
    """

    last: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="keep this many of the newest checkpoints"
    )
    best: KeepBest | None = Field(
        default=None,
        description="keep the `n` best by a metric that the program logs: `{ metric, n = 1, "
        'mode = "min" }`',
    )
    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="keep the first checkpoint at or after each multiple of this many steps",
    )
    every_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="keep the first checkpoint of each period of this many hours"
    )
    ttl: str | None = Field(
        default=None,
        description="time to live, such as `12h` or `7d`: keep every checkpoint that is younger",
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
        default="auto",
        description='interval between checkpoints: steps (`500`), time (`"300s"`, `"10m"`, '
        '`"1h"`) or `"auto"`',
    )
    keep: Keep = Keep()
    budget: Annotated[StrictInt, Field(ge=1)] | str | None = Field(
        default=None,
        description='most space that the run\'s checkpoints may take, as `"500GB"` or in bytes. '
        "If the next step does not fit, Holdfast first deletes what the keep rules "
        "allow. If it still does not fit, the save fails",
    )
    mirror: str | None = Field(
        default=None,
        description='URL that every checkpoint is copied to: `"s3://bucket/prefix"` or '
        '`"file:///shared/dir"`. Set credentials in the environment (`AWS_…`). For '
        "a store other than Amazon's, set `HOLDFAST_S3_ENDPOINT` or "
        "`AWS_ENDPOINT_URL`",
    )
    local: str | None = Field(
        default=None,
        description="directory on each node's own disk that files are written to first. It "
        "requires a mirror, which then holds the durable copy",
    )
    snapshots: Annotated[StrictInt, Field(ge=1)] | Literal["auto", "off"] = Field(
        default="auto",
        description="steps between snapshots, which are copies in memory. If the program dies, "
        "Holdfast commits the newest one. `auto` takes as many as cost 3 % of the "
        "time, and `off` takes none",
    )
    staging: Literal["memory"] = Field(
        default="memory",
        description="where a step is staged before it is written. `memory` is the only value",
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


class Cost(SpecPart):
    """Prices of GPU time."""

    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price that you pay for one GPU hour"
    )
    on_demand_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price of one GPU hour that is never preempted, for comparison"
    )
    currency: str = Field(default="USD", description="currency of both prices")


class RunSpec(SpecPart):
    """One training job, from its first step to its last.

    `command` holds the arguments for torchrun: a script and its arguments, or `-m` and a module.
    The program gets `config` unchanged, as `holdfast.trainer.config`.
    """

    name: str = Field(
        description="up to 100 letters, digits, `-` and `_`, starting with a letter or digit. "
        "Only one live run under a root can have a given name"
    )
    command: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="arguments that torchrun gets: a script and its arguments, or `-m` and a module"
    )
    environment: dict[str, EnvironmentValue] = Field(
        default_factory=dict,
        description="environment variables for the program. Each value is a string or a "
        "reference to a secret",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="settings for the program. Holdfast passes them on as "
        "`holdfast.trainer.config`. It reads only two things. It digests `data`, "
        "with the size and modification time of each file that `data` names. It "
        "shows progress against the first of `steps`, `max_steps`, `total_steps` "
        "and `train_steps`",
    )
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
