"""Prefect blocks that a team shares, and specs that name them.

A block is read once, when a run is created: its values become the defaults of the spec, and the
run's record has them. A block that changes later changes no run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from prefect.blocks.core import Block
from pydantic import Field

from holdfast.contracts.disk.paths import given_folder
from holdfast.flows.deployments import open_client, read_block


class HoldfastCluster(Block):
    """Where jobs of a team run: the defaults of `resources` in specs that name this block."""

    _block_type_name = "Holdfast Cluster"
    _block_type_slug = "holdfast-cluster"

    executor: Literal["slurm", "local"] = Field(default="slurm", description="slurm or local")
    partition: str | None = Field(default=None, description="Slurm partition")
    account: str | None = Field(default=None, description="Slurm account")
    qos: str | None = Field(default=None, description="Slurm QOS")
    constraint: str | None = Field(default=None, description="Slurm constraint on nodes")
    gpus_per_node: int | None = Field(default=None, ge=0, description="GPUs of a node")
    gpu_type: str | None = Field(default=None, description="type of GPU, such as a100")
    time_limit_min: int | None = Field(default=None, ge=1, description="time limit, in minutes")
    setup: list[str] | None = Field(
        default=None, description="shell lines before the program, such as `module load cuda`"
    )


class HoldfastStorage(Block):
    """Where runs and their checkpoints are, for specs that name this block."""

    _block_type_name = "Holdfast Storage"
    _block_type_slug = "holdfast-storage"

    root: str | None = Field(default=None, description="absolute path of the folder of runs")
    directory: str | None = Field(
        default=None, description="absolute path of the folder of checkpoints, apart from the root"
    )
    mirror: str | None = Field(
        default=None, description="where copies of checkpoints go, such as s3://bucket/runs"
    )


BLOCKS: Final = (HoldfastCluster, HoldfastStorage)
# The keys of a cluster that are not in `resources`.
_LAUNCH: Final = frozenset({"setup"})


def register_blocks() -> None:
    """Make the types of blocks known to Prefect, so that its UI can create them."""
    for block in BLOCKS:
        block.register_type_and_schema()


def with_blocks(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the table of a spec with the values of its blocks for the keys that it lacks.

    Returns also the keys whose values are those of blocks. Raises `ServiceError` if Prefect has no
    such block, or cannot be used.
    """
    names = table.get("blocks")
    if not isinstance(names, Mapping):
        return dict(table), []
    parts: dict[str, dict[str, Any]] = {}
    for key, value in _values(HoldfastCluster, names.get("cluster")).items():
        parts.setdefault("launch" if key in _LAUNCH else "resources", {})[key] = value
    for key, value in _values(HoldfastStorage, names.get("storage")).items():
        if key != "root":
            parts.setdefault("checkpoint", {})[key] = value
    merged, used = dict(table), []
    for part, values in parts.items():
        own = table.get(part, {})
        if isinstance(own, Mapping):
            # The spec's own keys win. The values of a block are only defaults.
            merged[part] = {**values, **own}
            used += [f"{part}.{key}" for key in values if key not in own]
    return merged, used


def root_of(storage: str | None) -> Path | None:
    """Return the folder of runs that a storage block names, or None. Raises `ServiceError`."""
    root = _values(HoldfastStorage, storage).get("root")
    return given_folder(root, "root") if root else None


def _values(kind: type[Block], name: object) -> dict[str, Any]:
    """Return the values that a block gives; none without a name."""
    if not isinstance(name, str) or not name:
        return {}
    with open_client() as client:
        found = read_block(client, str(kind._block_type_slug), name)
    return {key: value for key, value in found.data.items() if value is not None}
