"""Warn when Slurm's defaults give a job with GPUs few CPUs or little memory.

Without `resources.cpus_per_gpu`, most clusters give a node's one task one CPU, whatever its GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.spec.resources import gpu_kind, gpus_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm_restarts import problem_with_cluster

# What the partitions of this cluster offer to a run, for a person who chooses one.

Fields = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """A partition. `gpus` is the most on one of its `nodes` nodes, and `minutes_max` its limit.

    `preempt_mode` is what happens to a job when another one needs its nodes; '' if nothing does.
    """

    name: str
    is_default: bool
    nodes: int
    gpus: int
    gpu_type: str
    minutes_max: float | None
    preempt_mode: str

    def __str__(self) -> str:
        words = [f"{self.nodes} node{'s' * (self.nodes != 1)}"]
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        words.append(f"{self.gpus}{kind} GPUs each" if self.gpus else "no GPUs")
        if self.minutes_max is not None:
            words.append(f"at most {self.minutes_max:.0f} min")
        if self.preempt_mode:
            words.append(f"jobs are preempted by {self.preempt_mode}")
        return f"{self.name} ({', '.join(words)})"


def ask_partitions() -> list[PartitionFacts]:
    """Return this cluster's partitions, in Slurm's order. Raises `SchedulerError`."""
    return read_partitions(slurm_client.partitions(), slurm_client.show_nodes())


def read_partitions(partitions: Sequence[Fields], nodes: Sequence[Fields]) -> list[PartitionFacts]:
    """Return the facts, from what `scontrol` shows of the partitions and nodes."""
    return [_read(one, nodes) for one in partitions]


def choose_partition(known: Sequence[PartitionFacts]) -> PartitionFacts | None:
    """Return the default partition, or the one with most GPUs if there is no default."""
    return max(known, key=lambda one: (one.is_default, one.gpus), default=None)


def _read(partition: Fields, nodes: Sequence[Fields]) -> PartitionFacts:
    name = partition.get("PartitionName", "")
    gres = [node.get("Gres", "") for node in nodes if name in node.get("Partitions", "").split(",")]
    kinds = {gpu_kind(one) for one in gres if gpus_of(one)}
    mode = partition.get("PreemptMode", "OFF").upper()
    return PartitionFacts(
        name=name,
        is_default=partition.get("Default") == "YES",
        nodes=len(gres),
        gpus=max(map(gpus_of, gres), default=0),
        gpu_type=kinds.pop() if len(kinds) == 1 else "",
        minutes_max=slurm_client.parse_minutes(partition.get("MaxTime", "")),
        preempt_mode="" if mode in {"OFF", "N/A"} else mode,
    )


# A rank needs one CPU for its own thread, and one for loading data and copies.
CPUS_PER_RANK_MIN: Final = 2.0
MEMORY_GB_PER_RANK_MIN: Final = 8.0
MB_PER_GB: Final = 1024.0
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_MB_OF_UNIT: Final = {"K": 2**-10, "": 1.0, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}


def warnings_of_defaults(spec: RunSpec) -> list[str]:
    """Return warnings about CPUs and memory that the spec leaves to Slurm's defaults."""
    if spec.resources.executor != "slurm" or not spec.resources.gpus_on_node:
        return []
    try:
        settings = slurm_client.settings(slurm_client.call_briefly)
        partitions = slurm_client.partitions(slurm_client.call_briefly)
    except SchedulerError:
        return []
    return default_warnings(spec, settings, partitions)


def default_warnings(spec: RunSpec, settings: Fields, partitions: Sequence[Fields]) -> list[str]:
    """Return the warnings, without side effects.

    `settings` are those of `scontrol show config`, and `partitions` those of the cluster.
    """
    found = _warnings_of_age(spec, settings)
    if settings.get("SelectType") == "select/linear":
        # Every job has whole nodes.
        return found
    for partition in slurm_client.chosen_partitions(spec.resources, partitions):
        if not slurm_client.takes_whole_nodes(spec.resources, partition):
            found += _warnings_of_partition(spec, settings, partition)
    return found


def _warnings_of_age(spec: RunSpec, settings: Fields) -> list[str]:
    """Return a warning if a successor gains no priority while it waits for the attempt's job."""
    is_by_factors = settings.get("PriorityType") == "priority/multifactor"
    weight = settings.get("PriorityWeightAge", "0")
    has_age = weight not in {"", "0"}
    accrues = "ACCRUE_ALWAYS" in settings.get("PriorityFlags", "")
    standby = spec.resources.standby
    is_expedited = standby == "auto" and not problem_with_cluster(settings)
    if standby in {"none", "expedite"} or is_expedited:
        return []
    if not is_by_factors or not has_age or accrues:
        return []
    text = (
        "resources.standby: on this cluster, a job gains no priority by age while it waits for "
        "another job, so jobs of other users may pass the successor; ask the operators for "
        "PriorityFlags=ACCRUE_ALWAYS"
    )
    return [text]


def _warnings_of_partition(spec: RunSpec, settings: Fields, partition: Fields) -> Iterator[str]:
    resources, gpus = spec.resources, spec.resources.gpus_on_node
    ranks = spec.share(spec.gpus).ranks
    given = (resources.cpus_per_gpu or 0) * resources.size_per_node
    cpus = given or default_cpus(partition, settings, gpus)
    where = f"partition {partition.get('PartitionName', '')} gives this job"
    why = f"for {ranks} rank{'s' * (ranks != 1)}, because the spec leaves it to Slurm's default"
    if not given and cpus < CPUS_PER_RANK_MIN * ranks:
        share = _share_of_gpu(partition)
        yield (
            f"{where} {cpus} CPU{'s' * (cpus != 1)} on a node {why}: set resources.cpus_per_gpu"
            f"{share}"
        )
    memory_mb = default_memory_mb(partition, settings, gpus, cpus)
    is_given = resources.memory_gb_per_node or resources.memory_gb_per_cpu
    if not is_given and memory_mb is not None:
        memory_gb = memory_mb / MB_PER_GB
        if memory_gb < MEMORY_GB_PER_RANK_MIN * ranks:
            yield (
                f"{where} {memory_gb:.3g} GB of memory on a node {why}: set "
                f"resources.memory_gb_per_node{_memory_of_node(partition)}"
            )


def default_cpus(partition: Fields, settings: Fields, gpus: int) -> int:
    """Return the CPUs of one task with `gpus` GPUs that asks for none."""
    per_gpu = _job_default("DefCpuPerGPU", partition, settings)
    return int(per_gpu * gpus) if per_gpu else 1


def default_memory_mb(partition: Fields, settings: Fields, gpus: int, cpus: int) -> float | None:
    """Return the memory on a node of a job that asks for none; None if it is not limited."""
    if "MEMORY" not in settings.get("SelectTypeParameters", "").upper():
        return None
    if per_gpu := _job_default("DefMemPerGPU", partition, settings):
        return per_gpu * gpus
    # A partition's own value counts before the cluster's.
    for source in (partition, settings):
        if per_cpu := _megabytes(source.get("DefMemPerCPU", "")):
            return per_cpu * cpus
        if per_node := _megabytes(source.get("DefMemPerNode", "")):
            return per_node
    return None


def _job_default(name: str, partition: Fields, settings: Fields) -> float | None:
    """Return a value of `JobDefaults`, such as `DefCpuPerGPU=4,DefMemPerGPU=10240`."""
    for source in (partition, settings):
        pairs = dict(one.partition("=")[::2] for one in source.get("JobDefaults", "").split(","))
        if value := _megabytes(pairs.get(name, "")):
            return value
    return None


def _megabytes(text: str) -> float | None:
    """Return Slurm's number in its own unit, MB for memory; None for `UNLIMITED` and the like."""
    found = _COUNT.fullmatch(text.strip())
    return float(found[1]) * _MB_OF_UNIT[found[2]] if found else None


def _share_of_gpu(partition: Fields) -> str:
    tres = _tres_of(partition)
    cpus, gpus = tres.get("cpu", 0.0), tres.get("gres/gpu", 0.0)
    return f"; the partition has {cpus / gpus:.0f} CPUs for each GPU" if cpus >= gpus > 0 else ""


def _memory_of_node(partition: Fields) -> str:
    tres = _tres_of(partition)
    memory_mb, nodes = tres.get("mem", 0.0), tres.get("node", 0.0)
    if not memory_mb or not nodes:
        return ""
    return f"; its nodes have {memory_mb / nodes / MB_PER_GB:.0f} GB on average"


def _tres_of(partition: Fields) -> dict[str, float]:
    """Return the hardware of a partition by Slurm's names; memory in MB."""
    pairs = (one.partition("=") for one in partition.get("TRES", "").split(","))
    return {name: value for name, _, text in pairs if (value := _megabytes(text))}
