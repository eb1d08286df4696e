"""What the partitions of this cluster offer to a run, for a person who chooses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.contracts.spec.node_share import gpu_kind, gpus_of
from holdfast.workers.schedulers import slurm_client

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
