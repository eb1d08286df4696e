"""`RunSpec`: the description of a run, validated on construction and then frozen.

A spec defines what to run and within which limits. It does not contain the state of a run, which
is on disk (`history`). A supervisor compares the spec's digest to recognise its run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from holdfast.contracts.disk.digests import document_digest
from holdfast.contracts.disk.paths import SPEC_NAME
from holdfast.contracts.environment import KEYS_OF_VARIABLES, S3_ENDPOINT
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.effects import problems_of_effects
from holdfast.contracts.spec.node_share import NodeShare, share_of
from holdfast.contracts.spec.part import SpecPart, is_recorded
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.spec.secrets import EnvironmentValue, SecretReference
from holdfast.contracts.spec.sections import Alerts, Health, Program, Supervision
from holdfast.contracts.spec.slurm_options import problem_with_setup
from holdfast.contracts.spec.steps_total import problem_with_steps
from holdfast.contracts.spec.written import sources_of

# The torchrun options that a spec must not contain, because Holdfast sets them itself.

_OPTION: Final = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_SIZE: Final = "set resources.nodes and resources.gpus_per_node"
_MEETING: Final = "leave it out: node 0's agent chooses where the ranks meet at each launch"
_PROGRAM: Final = "set command"
_LOGS: Final = "leave it out: Holdfast writes the output to the run's folder, see holdfast logs"
_ENDINGS: Final = "leave it out: the agent restarts and ends the ranks"
REFUSED: Final = {
    "nnodes": _SIZE,
    "nproc-per-node": "set resources.nproc_per_node",
    "node-rank": _SIZE,
    "rdzv-backend": _MEETING,
    "rdzv-endpoint": _MEETING,
    "rdzv-id": _MEETING,
    "rdzv-conf": _MEETING,
    "standalone": _MEETING,
    "local-addr": _MEETING,
    "master-addr": _MEETING,
    "master-port": _MEETING,
    "max-restarts": _ENDINGS,
    "monitor-interval": _ENDINGS,
    "signals-to-handle": _ENDINGS,
    "shutdown-timeout": _ENDINGS,
    "log-dir": _LOGS,
    "redirects": _LOGS,
    "tee": _LOGS,
    "local-ranks-filter": _LOGS,
    "module": _PROGRAM,
    "no-python": _PROGRAM,
    "run-path": _PROGRAM,
}


def problem_with_torchrun(option: str) -> str:
    """Return why `launch.torchrun` must not contain `option`; empty if it may.

    torchrun accepts underscores for hyphens and unique beginnings of names.
    """
    # Only underscores in the option's name are replaced, not those in its value, such as a path.
    found = _OPTION.fullmatch(option.replace("_", "-", option.partition("=")[0].count("_")))
    if found is None:
        return f"option {option!r}: expected one option with its value, as in --numa-binding=node"
    # argparse accepts unique beginnings, so `--nno` would reach torchrun as `--nnodes`.
    refused = next((name for name in REFUSED if name.startswith(found[1])), None)
    return "" if refused is None else f"option {option!r} is not for torchrun: {REFUSED[refused]}"


_OWN = "HOLDFAST_"
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Launch(SpecPart):
    """How a node starts the program."""

    python: str = Field(
        default="",
        description="Python interpreter of the job's environment: a name on `PATH`, or a path. A "
        "relative path starts at the working directory, and is refused in a container. Empty: "
        "that of the agent",
    )
    setup: tuple[str, ...] = Field(
        default=(),
        description="lines of bash to run before the program, such as `module load cuda`. If one "
        "fails, the launch fails. A line that may fail ends with `|| true`",
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
    node_setup: tuple[str, ...] = Field(
        default=(),
        description="lines of bash that every node runs before the program, inside a container, "
        "such as `ulimit -l unlimited`. If one fails, the launch fails",
    )
    wrapper: tuple[str, ...] = Field(
        default=(),
        description='command that starts the job on each node, such as `["numactl", '
        '"--interleave=all"]` or `["apptainer", "exec", "--nv", "image.sif"]`. `python` and its '
        "arguments follow",
    )
    network_interface: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}$")] | None
    ) = Field(
        default=None,
        description="network interface of each node for the traffic between nodes, such as "
        "`ib0`. Agents and ranks meet at its addresses, and NCCL and gloo use it. None: the "
        "address of the host name, and the choice of NCCL and gloo",
    )
    torchrun: tuple[str, ...] = Field(
        default=(),
        description="further torchrun options, such as `--numa-binding=node`. Options that "
        "Holdfast sets itself are refused",
    )
    export: Literal["all", "none"] = Field(
        default="all",
        description="environment that a Slurm job starts with. `all` is that of the submitter, "
        "`none` is a new login's",
    )
    working_directory: str = Field(
        default=".",
        description="working directory of the program, relative to the folder of the spec",
    )
    code: Literal["in_place", "snapshot"] = Field(
        default="in_place",
        description="`in_place` runs the code where it is. `snapshot` copies the working "
        "directory into the run, at most 512 MiB, and runs the copy. It copies the files that git "
        "tracks or does not ignore, with those of submodules, or all files except caches where "
        "there is no git",
    )

    @field_validator("container", "srun")
    @classmethod
    def _one_component(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # Recorded specs are passed over: a rule that became stricter must not end a live run, see
        # decision 44.
        several = [option for option in value if option.startswith(("--het-group", "--pack-group"))]
        if several and not is_recorded(info):
            raise ValueError(
                f"{several[0]!r}: Holdfast does not start heterogeneous jobs; leave the option out"
            )
        return value

    @field_validator("setup")
    @classmethod
    def _setup_has_no_options(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        problem = problem_with_setup(value)
        if problem and not is_recorded(info):
            raise ValueError(problem)
        return value

    @field_validator("torchrun")
    @classmethod
    def _torchrun_options_are_not_holdfasts(
        cls, value: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        problems = [problem for option in value if (problem := problem_with_torchrun(option))]
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


class Cost(SpecPart):
    """Prices of GPU time."""

    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price that you pay for one GPU hour"
    )
    on_demand_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price of one GPU hour that is never preempted, for comparison"
    )
    currency: str = Field(default="USD", description="currency of both prices")


class Blocks(SpecPart):
    """Blocks of Prefect, by name. Their values are the defaults of the spec's other parts."""

    cluster: str | None = Field(
        default=None,
        description="block of the type `holdfast-cluster`, with defaults of `resources` and "
        "`launch.setup`",
    )
    storage: str | None = Field(
        default=None,
        description="block of the type `holdfast-storage`, with the folder of the runs and "
        "defaults of `checkpoint.directory` and `checkpoint.mirror`",
    )


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
        "with the size and modification time of each file that `data` names. The first of "
        "`steps`, `max_steps`, `total_steps` and `train_steps` is the program's last step: "
        "Holdfast shows progress against it, and reports a program that exits before it as "
        "incomplete",
    )
    launch: Launch = Launch()
    program: Program = Program()
    resources: Resources = Resources()
    elastic: Elastic = Elastic()
    checkpoint: Checkpointing = Checkpointing()
    supervision: Supervision = Supervision()
    health: Health = Health()
    cost: Cost = Cost()
    alerts: Alerts = Alerts()
    blocks: Blocks = Blocks()
    # Where keys come from that were not written in the spec itself: see `contracts.written`.
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not SPEC_NAME.fullmatch(value):
            raise ValueError(
                f"{value[:120]!r}: expected up to 100 letters, digits, '-' and '_', starting "
                "with a letter or digit"
            )
        return value

    @field_validator("environment")
    @classmethod
    def _environment_names_are_names(
        cls, value: dict[str, str | SecretReference], info: ValidationInfo
    ) -> dict[str, str | SecretReference]:
        wrong = [name for name in value if not ENVIRONMENT_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong}: expected names such as OMP_NUM_THREADS")
        own = [name for name in value if name.startswith(_OWN) and name != S3_ENDPOINT]
        if own and not is_recorded(info):
            key = KEYS_OF_VARIABLES.get(own[0])
            advice = f"set {key}" if key else "leave it out"
            raise ValueError(f"{own[0]}: Holdfast sets the variables HOLDFAST_… itself; {advice}")
        return value

    @field_validator("config")
    @classmethod
    def _steps_are_a_number(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        problem = problem_with_steps(value)
        if problem and not is_recorded(info):
            raise ValueError(problem)
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
        elastic = self.elastic
        counts = [("resources", self.gpus)]
        counts += [("elastic.choices", count) for count in elastic.choices]
        counts += [("elastic.on_preemption", count) for count in elastic.on_preemption]
        for key, count in counts:
            if not low <= count <= high:
                raise ValueError(f"{key}: {counted(count, 'GPU')}: outside elastic {low} to {high}")
            self._require_share(key, count)
        if low < self.resources.size_per_node:
            # Below one node, the least count must have a whole number of ranks.
            self._require_share("elastic.min_gpus", low)
        return self

    def _require_share(self, key: str, count: int) -> None:
        try:
            self.share(count)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    @model_validator(mode="after")
    def _every_key_has_an_effect(self, info: ValidationInfo) -> RunSpec:
        """Refuse keys that cannot act in this run, one problem a line; see `spec_effects`."""
        if not is_recorded(info) and (problems := problems_of_effects(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def gpus(self) -> int:
        """The size of the first attempt: its GPUs, or its ranks if it has none."""
        return self.resources.nodes * self.resources.size_per_node

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

    def share(self, gpus: int) -> NodeShare:
        """Return the nodes of an attempt of size `gpus`, and the GPUs and ranks of each.

        Raises `ValueError` when it does not fill whole nodes or has no whole number of ranks.
        """
        return share_of(gpus, self.resources.gpus_per_node, self.resources.nproc_per_node)

    def can_split(self, gpus: int) -> bool:
        """Return True if an attempt can have the size `gpus`."""
        with contextlib.suppress(ValueError):
            return bool(self.share(gpus))
        return False

    def ranks(self, gpus: int) -> int:
        """Return the world size of an attempt of size `gpus`. Raises `ValueError` like `share`."""
        share = self.share(gpus)
        return share.nodes * share.ranks

    def size_of(self, ranks: int) -> int | None:
        """Return the size of an attempt of world size `ranks`; None if there is none."""
        size, rest = divmod(ranks * self.resources.size_per_node, self._ranks_per_node)
        return size if not rest and self.can_split(size) else None

    def gpus_held(self, ranks: int) -> int:
        """Return the GPUs that an attempt of world size `ranks` holds."""
        resources = self.resources
        if resources.gres:
            return -(-ranks // self._ranks_per_node) * resources.gpus_on_node
        return ranks * resources.gpus_per_node // self._ranks_per_node

    @property
    def _ranks_per_node(self) -> int:
        return self.resources.nproc_per_node or self.resources.size_per_node

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the user gave, without the defaults."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def sources(self) -> dict[str, str]:
        """Where each key that somebody wrote comes from, by dotted names: see `written`."""
        return sources_of(self, self._origins)

    @property
    def origins(self) -> dict[str, str]:
        """Where keys come from that were not written in the spec itself."""
        return dict(self._origins)

    def with_origins(self, origins: Mapping[str, str]) -> RunSpec:
        """Return this spec with the origins of keys that were not written in the spec itself."""
        spec = self.model_copy()
        spec._origins = dict(origins)
        return spec

    @property
    def digest(self) -> str:
        """SHA-256 of the whole spec, with the defaults of this version of Holdfast."""
        return document_digest(self.model_dump(mode="json"))
