"""Show whether a checkpoint fits a number of ranks, and the memory that each then needs.

    python -m holdfast.trainer.shape DIRECTORY --ranks N [--json]

This reads only the manifest and `.metadata`. It loads neither the program nor any tensor.
`contracts.topology` decides which counts fit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.contracts.records import topology
from holdfast.trainer.format.metadata import METADATA, open_checkpoint
from holdfast.trainer.slots.slots import SLOTS_PER_RANK

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."
OPTIMIZER_STATE: Final = "optimizer.state."


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The bytes that the largest rank needs, without activations.

    `device` is the sum of parameters, gradients, optimizer state and the rest, on the model's
    device. `staging` is the node memory of the rank's two staging slots.
    """

    ranks: int
    fits: bool
    problem: str | None
    counts: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    other: int
    device: int
    staging: int


def foresee(directory: Path, ranks: int) -> Shape:
    """Return the shape of the checkpoint in `directory` on `ranks` ranks.

    Raises `DamagedCheckpointError` if the manifest or `.metadata` is damaged, and `CheckpointError`
    if the checkpoint was never committed.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(
            f"{directory}: has no manifest, so it was never committed; name a committed checkpoint"
        )
    now = topology.degrees_of(manifest)
    then = topology.rescale(now, manifest, ranks)
    problem = topology.problem_with_mesh(manifest, ranks)
    then = then or now
    found = [open_checkpoint(folder).metadata for folder in stage_folders(directory)]
    stages = [weigh(metadata, now, then) for metadata in found]
    largest = max(stages, key=lambda parts: sum(parts.values()))
    staging = max(parts["image"] for parts in stages)
    device = sum(largest[part] for part in ("parameters", "gradients", "optimizer", "other"))
    return Shape(
        ranks=ranks,
        fits=problem is None,
        problem=problem,
        counts=topology.fitting_counts(manifest, now),
        parameters=largest["parameters"],
        gradients=largest["gradients"],
        optimizer=largest["optimizer"],
        other=largest["other"],
        device=device,
        staging=SLOTS_PER_RANK * staging,
    )


def stage_folders(directory: Path) -> list[Path]:
    """Return the directory itself, or its `pp{i}/` folders if a pipeline wrote it."""
    if (directory / METADATA).exists():
        return [directory]
    stages = sorted(directory.glob("pp*/.metadata"))
    if not stages:
        raise DamagedCheckpointError(
            f"{directory}: has no {METADATA}; `holdfast verify` lists all missing files",
            damaged=[f"{METADATA}: missing"],
        )
    return [path.parent for path in stages]


def weigh(metadata: Metadata, now: topology.Degrees, then: topology.Degrees) -> dict[str, int]:
    """Return the bytes of one stage's largest rank, by part. `image` is its share of the files."""
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
            # A parameter with optimizer state also has a gradient.
            if key.removeprefix(MODEL) in trained:
                parts["gradients"] += own
        elif key.startswith(OPTIMIZER):
            parts["optimizer"] += own
        else:
            parts["other"] += own
        whole = math.prod(entry.size) * entry.properties.dtype.itemsize
        parts["image"] += -(-whole // (then.model * then.data * then.replicas))
    return parts


def shard_bytes(entry: TensorStorageMetadata, now: topology.Degrees, then: topology.Degrees) -> int:
    """Return the bytes of one tensor's largest part under the degrees `then`.

    The number of saved chunks shows how the tensor was cut: by the data-parallel ranks, by the
    ranks of a fixed dimension, by both, or not at all.
    """
    chunks = len(entry.chunks)
    whole = math.prod(entry.size) * entry.properties.dtype.itemsize
    axis = max(range(len(entry.size)), key=lambda d: entry.size[d], default=None)
    if axis is None or (chunks <= 1 and now.data * now.model > 1):
        return whole
    parts = _parts_then(chunks, now, then)
    if chunks > 1:
        cut = [d for d, size in enumerate(entry.chunks[0].sizes) if size < entry.size[d]]
        axis = cut[0] if cut else axis
    elif now.data == 1:
        # FSDP2 cuts the first dimension, as is the common default.
        axis = 0
    rows = entry.size[axis]
    return whole // max(rows, 1) * -(-rows // parts)


def _parts_then(chunks: int, now: topology.Degrees, then: topology.Degrees) -> int:
    if now.model > 1 and chunks <= now.model and now.data != chunks:
        return chunks
    if now.model > 1 and chunks > max(now.model, now.data):
        return then.data * now.model
    return then.data


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the checkpoint fits, 1 if not or if it is bad, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.shape", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    if given.ranks < 1:
        parser.error(f"--ranks {given.ranks}: expected 1 or more")
    try:
        shape = foresee(given.directory, given.ranks)
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
