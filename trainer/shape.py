"""Whether a checkpoint fits a number of GPUs, and the memory that each of them then needs.

    python -m holdfast.trainer.shape DIRECTORY --gpus N [--json]

Read from the manifest and `.metadata` alone: neither the program nor a tensor is loaded. The
dimensions of the recorded mesh that split a model (tensor, expert, context, pipeline) stay as they
are; the data-parallel ones take what is left of the GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.slots import SLOTS_PER_RANK
from holdfast.trainer.planning.metadata import METADATA, read_metadata

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."
OPTIMIZER_STATE: Final = "optimizer.state."
# Mesh dimensions by the names that the field gives them: those that copy the whole state, and
# those that split a batch. Any other dimension splits the model and is not ours to change.
REPLICATING: Final = frozenset({"dp_replicate", "replicate"})
DATA: Final = REPLICATING | {"dp", "dp_shard", "fsdp", "shard", "data", "dim0"}
PIPELINE: Final = "pp"
COUNTS_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ways the state is split: `model` by fixed dimensions, `data` by data-parallel ones.

    `pipeline` stages, each with `replicas` whole copies.
    """

    model: int
    data: int
    pipeline: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.model * self.data * self.pipeline * self.replicas


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one rank needs, in bytes; the largest rank counts. Activations are not known here.

    `device` is parameters, gradients, optimizer state and the rest, where the model lives;
    `staging` is the node's memory that the rank's two staging slots take.
    """

    gpus: int
    fits: bool
    problem: str | None
    counts: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    other: int
    device: int
    staging: int


def foresee(directory: Path, gpus: int) -> Shape:
    """The shape of the checkpoint in `directory` on `gpus` ranks.

    Raises `DamagedCheckpointError` when manifest or `.metadata` cannot be believed, and
    `CheckpointError` when the checkpoint was never committed.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(
            f"{directory}: has no manifest, so it was never committed; name a committed checkpoint"
        )
    now = degrees_of(manifest)
    then = rescale(now, manifest, gpus)
    problem = None
    if then is None:
        problem = explain(manifest, now, gpus)
        then = now
    stages = [weigh(read_metadata(folder), now, then) for folder in stage_folders(directory)]
    largest = max(stages, key=lambda parts: sum(parts.values()))
    staging = max(parts["image"] for parts in stages)
    device = sum(largest[part] for part in ("parameters", "gradients", "optimizer", "other"))
    return Shape(
        gpus=gpus,
        fits=problem is None,
        problem=problem,
        counts=fitting_counts(manifest, now),
        parameters=largest["parameters"],
        gradients=largest["gradients"],
        optimizer=largest["optimizer"],
        other=largest["other"],
        device=device,
        staging=SLOTS_PER_RANK * staging,
    )


def stage_folders(directory: Path) -> list[Path]:
    """The directory itself, or its `pp{i}/` folders when a pipeline wrote it."""
    if (directory / METADATA).exists():
        return [directory]
    stages = sorted(directory.glob("pp*/.metadata"))
    if not stages:
        raise DamagedCheckpointError(
            f"{directory}: has no {METADATA}; `holdfast verify` lists what else is missing",
            damaged=[f"{METADATA}: missing"],
        )
    return [path.parent for path in stages]


def degrees_of(manifest: Manifest) -> Degrees:
    """How the checkpoint was split when it was saved."""
    mesh: Mapping[str, int] = manifest.topology.get("mesh") or {}
    pipeline = int(manifest.topology.get("pipeline") or mesh.get(PIPELINE) or 1)
    fixed = {n: s for n, s in mesh.items() if n not in DATA and n != PIPELINE}
    replicas = math.prod(size for name, size in mesh.items() if name in REPLICATING)
    sharding = [s for n, s in mesh.items() if n in DATA and n not in REPLICATING]
    # Without a mesh every rank has a whole copy: plain data parallelism, or a single process.
    data = math.prod(sharding) if sharding else 1
    model = math.prod(fixed.values())
    known = model * data * pipeline
    return Degrees(
        model=model,
        data=data,
        pipeline=pipeline,
        replicas=max(replicas, manifest.world_size // known),
    )


def rescale(now: Degrees, manifest: Manifest, gpus: int) -> Degrees | None:
    """The degrees on `gpus` ranks, or None when the fixed ones do not divide them.

    Where the mesh had a replicating dimension its copies follow the count and shards stay, as
    hybrid sharding is launched; else the shards follow it.
    """
    mesh: Mapping[str, int] = manifest.topology.get("mesh") or {}
    shards = any(name in DATA and name not in REPLICATING for name in mesh)
    copies = any(name in REPLICATING for name in mesh) or not shards
    fixed = now.model * now.pipeline * (now.data if copies else 1)
    if gpus < fixed or gpus % fixed:
        return None
    left = gpus // fixed
    return Degrees(
        model=now.model,
        data=now.data if copies else left,
        pipeline=now.pipeline,
        replicas=left if copies else 1,
    )


def explain(manifest: Manifest, now: Degrees, gpus: int) -> str:
    """Why `gpus` does not do, and the counts around it that would."""
    mesh: Mapping[str, int] = manifest.topology.get("mesh") or {}
    parts = dict(mesh)
    if now.pipeline > 1:
        parts[PIPELINE] = now.pipeline
    layout = " × ".join(f"{name} {size}" for name, size in parts.items())
    counts = ", ".join(map(str, fitting_counts(manifest, now, around=gpus)))
    return (
        f"{gpus} GPUs cannot hold the mesh {layout} whose fixed dimensions it was saved with; "
        f"counts that can: {counts}. Another mesh in the program may load it all the same"
    )


def fitting_counts(manifest: Manifest, now: Degrees, around: int | None = None) -> tuple[int, ...]:
    """GPU counts that keep the fixed dimensions, those nearest to `around` (the saved count)."""
    middle = around or manifest.world_size
    candidates = [n for n in range(1, 4 * max(middle, now.ranks) + 1) if rescale(now, manifest, n)]
    nearest = sorted(candidates, key=lambda n: (abs(n - middle), n))[:COUNTS_SHOWN]
    return tuple(sorted(nearest))


def weigh(metadata: Metadata, now: Degrees, then: Degrees) -> dict[str, int]:
    """Bytes of the largest rank of one stage, by part; `image` is its share of the files."""
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "other", "image"), 0)
    tensors = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    states = (key.removeprefix(OPTIMIZER_STATE) for key in tensors if OPTIMIZER_STATE in key)
    trained = {key.rpartition(".")[0] for key in states}
    for key, entry in tensors.items():
        own = shard_bytes(entry, now, then)
        if key.startswith(MODEL):
            parts["parameters"] += own
            # What the optimizer keeps a state for is what gradients are made for.
            if key.removeprefix(MODEL) in trained:
                parts["gradients"] += own
        elif key.startswith(OPTIMIZER):
            parts["optimizer"] += own
        else:
            parts["other"] += own
        whole = math.prod(entry.size) * entry.properties.dtype.itemsize
        parts["image"] += -(-whole // (then.model * then.data * then.replicas))
    return parts


def shard_bytes(entry: TensorStorageMetadata, now: Degrees, then: Degrees) -> int:
    """Bytes of the largest part of one tensor once the degrees are `then`.

    The saved chunks tell how it was cut: into as many as the data-parallel ranks, or the ranks of
    a fixed dimension, or both, or not at all.
    """
    chunks = len(entry.chunks)
    whole = math.prod(entry.size) * entry.properties.dtype.itemsize
    axis = max(range(len(entry.size)), key=lambda d: entry.size[d], default=None)
    if axis is None or (chunks <= 1 and now.data * now.model > 1):
        return whole
    parts = _parts_then(chunks, now, then)
    if entry.chunks and chunks > 1:
        first = entry.chunks[0].sizes
        cut = [d for d, size in enumerate(first) if size < entry.size[d]]
        axis = cut[0] if cut else axis
    elif now.data == 1:
        # FSDP2 and the field's default cut the first dimension.
        axis = 0
    rows = entry.size[axis]
    return whole // max(rows, 1) * -(-rows // parts)


def _parts_then(chunks: int, now: Degrees, then: Degrees) -> int:
    if now.model > 1 and chunks <= now.model and now.data != chunks:
        return chunks
    if now.model > 1 and chunks > max(now.model, now.data):
        return then.data * now.model
    return then.data


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 it fits, 1 it does not or the checkpoint is bad, 2 the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.shape", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    if given.gpus < 1:
        parser.error(f"--gpus {given.gpus}: expected 1 or more")
    try:
        shape = foresee(given.directory, given.gpus)
    except CheckpointError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(asdict(shape)))
    else:
        print(shape.problem or f"fits: {shape.device} bytes per rank, {shape.staging} of staging")
    return 0 if shape.fits else 1


if __name__ == "__main__":
    sys.exit(main())
