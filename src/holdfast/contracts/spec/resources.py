"""`resources` of a run spec: what the job of an attempt asks for, and where.

The size of a run is its number of GPUs, as `elastic` counts them. A run without GPUs counts its
ranks instead.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from holdfast.contracts.plain_text import counted, exact
from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.spec.slurm_options import SbatchOptions

_GPU_TYPE = r"^[A-Za-z][A-Za-z0-9_.-]*$"
NO_GRES: Final = "none"
# `gpu`, `gpu:2`, `gpu:h100`, `gpu:2080ti:2`. A kind is not all digits. No count means one GPU.
_GPUS: Final = re.compile(
    r"(?:^|,)(?:gres[/:])?gpu(?::([^:(,=]*[^0-9:(,=][^:(,=]*))?(?:[:=]([0-9]+))?(?=[(,]|$)"
)
# `(S:0-1)`, `(IDX:0,2-3)`: the location of the GPUs, which contains commas.
_IN_BRACKETS: Final = re.compile(r"\([^)]*\)")


class NodeShare(NamedTuple):
    """A number of nodes, and the GPUs and ranks of each."""

    nodes: int
    gpus: int
    ranks: int


def share_of(size: int, gpus_per_node: int, nproc_per_node: int | None = None) -> NodeShare:
    """Return the nodes for `size` GPUs, or for `size` ranks if nodes have no GPUs.

    `nproc_per_node` are the ranks of a whole node, None for one per GPU. A part of a node has the
    same part of its ranks. Raises `ValueError` when the size does not fill whole nodes, or when a
    part of a node has no whole number of ranks.
    """
    per_node, noun = gpus_per_node or nproc_per_node or 1, "GPUs" if gpus_per_node else "ranks"
    # Up to a whole node, any number of GPUs is a part of one. Beyond it only whole nodes count,
    # because a job asks for equally many GPUs on each of its nodes.
    nodes, rest = (1, 0) if size <= per_node else divmod(size, per_node)
    if rest:
        raise ValueError(
            f"{size} {noun} do not fill nodes of {per_node}: expected {per_node} or fewer, or a "
            f"multiple of {per_node}"
        )
    here = size // nodes
    # The ranks keep their ratio to the GPUs: with a fixed number, fewer GPUs would hold more ranks
    # each and run out of memory, see decision 57.
    ranks, rest = divmod(here * (nproc_per_node or per_node), per_node)
    if rest:
        raise ValueError(
            f"{counted(size, 'GPU')}: a part of a node that has {per_node} GPUs and "
            f"resources.nproc_per_node = {nproc_per_node} ranks, and its part of the ranks is no "
            f"whole number: expected a count whose {nproc_per_node}/{per_node} is whole"
        )
    return NodeShare(nodes, here if gpus_per_node else 0, ranks)


def problem_with_sizes(
    gpus_per_node: int, nproc_per_node: int | None, gres: str | None, gpu_type: str | None
) -> str:
    """Return why these values of `resources` contradict each other; empty if they do not."""
    if gpu_type and gres:
        return (
            f"resources.gpu_type {gpu_type!r} and resources.gres {gres!r}: expected one of them; "
            "gres can name the type itself"
        )
    if gpus_per_node == 0 and nproc_per_node is None:
        return (
            "resources.gpus_per_node 0: a run without GPUs needs resources.nproc_per_node, the "
            "number of ranks on each node"
        )
    # A `gres` without GPUs, such as `shard:8` or `none`, says nothing about them.
    wanted = gres if gres and gpus_of(gres) else gpu_type
    if gpus_per_node == 0 and wanted:
        return (
            f"resources.gpus_per_node 0 and {wanted!r}, which asks for GPUs: leave gres and "
            "gpu_type out, or set gpus_per_node"
        )
    if gres == NO_GRES and gpus_per_node and nproc_per_node:
        return (
            f"resources.gres 'none' requests no GPUs, but gpus_per_node is {gpus_per_node}: for "
            f"{nproc_per_node} ranks without GPUs set gpus_per_node = 0 and leave gres out"
        )
    return ""


def gpus_of(gres: str, kind: str = "") -> int:
    """Return the GPUs in a GRES such as `gpu:a100:4(S:0-1),shard:8`, only of `kind` if given."""
    found = _GPUS.findall(_IN_BRACKETS.sub("", gres))
    return sum(int(count or 1) for each, count in found if kind in {"", each})


def gpu_kind(gres: str) -> str:
    """Return the one GPU kind in a GRES string; '' if it names none or several."""
    kinds = {kind for kind, _ in _GPUS.findall(_IN_BRACKETS.sub("", gres)) if kind}
    return kinds.pop() if len(kinds) == 1 else ""


class Fallback(SpecPart):
    """Another choice of where attempts run. Keys without a value are those of `resources`."""

    partition: str | None = Field(default=None, description="Slurm partition of this choice")
    account: str | None = Field(default=None, description="Slurm account of this choice")
    qos: str | None = Field(default=None, description="Slurm QOS of this choice")
    gpu_type: Annotated[str, Field(pattern=_GPU_TYPE)] | None = Field(
        default=None, description="type of GPU of this choice"
    )
    after_min: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="minutes that a job may wait in the choice before, until the run takes this "
        "one. If Slurm expects a longer wait, the run takes it at once",
    )
    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price of one GPU hour here. None: `cost.gpu_hour`"
    )

    @model_validator(mode="after")
    def _differs(self) -> Fallback:
        if not any((self.partition, self.account, self.qos, self.gpu_type)):
            raise ValueError("expected at least one of partition, account, qos and gpu_type")
        return self


class Resources(SpecPart):
    """The resources of the first attempt."""

    executor: Literal["local", "slurm"] = Field(
        default="local", description="`local` runs on this machine, `slurm` submits to Slurm"
    )
    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="number of nodes. The local executor has one"
    )
    spare_nodes: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0,
        description="further nodes of each job, which wait idle and replace nodes that are lost: "
        "the attempt continues in the same job. An attempt on one node has none. They are paid for "
        "like the others",
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1,
        description="GPUs per node, with one rank each unless `nproc_per_node` is given. The local "
        "executor starts the ranks on the CPU if the machine has no GPUs. 0 requests no GPUs, and "
        "needs `nproc_per_node`",
    )
    nproc_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="ranks per node, torchrun's `--nproc-per-node`. None: one per GPU. With fewer "
        "GPUs on a node, an attempt has proportionally fewer ranks",
    )
    cpus_per_gpu: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="CPU cores per GPU, or per rank if `gpus_per_node` is 0. None: Slurm's default",
    )
    memory_gb_per_node: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="memory per node, in GB. None: `memory_gb_per_cpu`, or Slurm's default",
    )
    memory_gb_per_cpu: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="memory per CPU core, in GB, for sites that require `--mem-per-cpu`. Set this "
        "key or `memory_gb_per_node`, not both",
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
    gpu_type: Annotated[str, Field(pattern=_GPU_TYPE)] | None = Field(
        default=None,
        description="type of GPU, as Slurm names it in its GRES, such as `h100`. None: any",
    )
    gres: str | None = Field(
        default=None,
        description="GRES of each node instead of `gpu:<gpus_per_node>`. `none` requests no GRES",
    )
    extra: SbatchOptions = Field(
        default_factory=dict,
        description="further sbatch options by their long names, such as `reservation` or "
        "`nodelist`. Options that Holdfast sets itself are refused, with the key to "
        "use instead",
    )

    fallbacks: Annotated[tuple[Fallback, ...], Field(max_length=8)] = Field(
        default=(),
        description="where the run goes if its job waits for too long, in order, such as spot "
        "capacity elsewhere and then capacity on demand",
    )
    return_after_min: Annotated[float, Field(gt=0)] = Field(
        default=10.0,
        description="minutes for which the first choice must have enough free GPUs before a run "
        "leaves a fallback. It saves, stops and continues there",
    )

    standby: Literal["none", "successor", "expedite", "auto"] = Field(
        default="none",
        description="how the next attempt avoids the end of the queue. `successor`: while an "
        "attempt runs, Holdfast keeps a second job of the same size in the queue, which Slurm "
        "starts when the attempt's job has ended. It becomes the next attempt, or is withdrawn. "
        "`expedite`: Slurm 25.11 or later restarts the job at the highest priority after a node "
        "failure, and the restart becomes the next attempt. `auto`: `expedite` where the cluster "
        "allows it and the job has no spare nodes, else `successor`",
    )

    commit_comment: bool = Field(
        default=False,
        description="keep the step and the time of the newest commit in the comment of the Slurm "
        "job, such as `holdfast:step-1200@1764302400` (Unix seconds), so that a site's "
        "scheduler can preempt a job that loses little. It changes at most once a minute",
    )

    @model_validator(mode="after")
    def _gpus_and_ranks_agree(self) -> Resources:
        if problem := problem_with_sizes(
            self.gpus_per_node, self.nproc_per_node, self.gres, self.gpu_type
        ):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _spares_are_not_expedited(self) -> Resources:
        if self.standby == "expedite" and self.spare_nodes:
            raise ValueError(
                f"resources.spare_nodes {self.spare_nodes} and resources.standby 'expedite': Slurm "
                "ends and restarts such a job when a node fails, so no spare node takes its place; "
                "set standby to 'successor' or 'auto', or spare_nodes to 0"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Resources:
        per_node, per_cpu = self.memory_gb_per_node, self.memory_gb_per_cpu
        if per_node is not None and per_cpu is not None:
            raise ValueError(
                f"resources.memory_gb_per_node {exact(per_node)} and resources.memory_gb_per_cpu "
                f"{exact(per_cpu)}: Slurm takes one of them, so leave the other out"
            )
        return self

    def at(self, place: int) -> Resources:
        """Return the resources of a place: 0 is the first choice, and n the n-th fallback.

        Raises `ValueError` if the fallback contradicts other keys, which only a recorded spec can.
        """
        if not 0 < place <= len(self.fallbacks):
            return self
        found = self.fallbacks[place - 1]
        given = {
            "partition": found.partition,
            "account": found.account,
            "qos": found.qos,
            "gpu_type": found.gpu_type,
        }
        # Only the given keys: a default must not count as written, see decision 88.
        own = {name: getattr(self, name) for name in self.model_fields_set}
        # A copy would not be validated. The rules for new specs were applied to the whole spec.
        return type(self).read({**own, **{key: value for key, value in given.items() if value}})

    def problem_at(self, place: int) -> str:
        """Return why attempts cannot run at a place; empty if they can."""
        try:
            self.at(place)
        except ValidationError as error:
            return error.errors()[0]["msg"].removeprefix("Value error, ")
        return ""

    def next_place(self, place: int) -> int | None:
        """Return the place where a job goes that waits for too long at `place`; None at the last.

        A fallback that contradicts other keys is passed over. Only recorded specs have such ones.
        """
        later = range(place + 1, len(self.fallbacks) + 1)
        return next((each for each in later if not self.problem_at(each)), None)

    def gpu_hour_at(self, place: int) -> float | None:
        """Return the price of a GPU hour at a place; None if the place has no price."""
        # Attempts of one run may cost differently, so a price belongs to a place.
        return self.fallbacks[place - 1].gpu_hour if 0 < place <= len(self.fallbacks) else None

    def spares_beside(self, nodes: int) -> int:
        """Return how many spare nodes the job of an attempt on `nodes` nodes has."""
        return self.spare_nodes if nodes > 1 else 0

    @property
    def size_per_node(self) -> int:
        """The size of a whole node as `elastic` counts it: GPUs, or ranks if it has none."""
        return self.gpus_per_node or self.nproc_per_node or 1

    @property
    def gpus_on_node(self) -> int:
        """The GPUs that Slurm allocates on each whole node."""
        return gpus_of(self.gres) if self.gres else self.gpus_per_node
