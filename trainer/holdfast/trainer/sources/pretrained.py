"""Load pretrained weights of another program into a model, at any world size and sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer.arguments import check_path
from holdfast.trainer.format.metadata import Opened, pick_entries
from holdfast.trainer.format.saved_boxes import BoxTable, SavedBoxes
from holdfast.trainer.loading.checkpoint import check_all
from holdfast.trainer.loading.reader import LoadReport, load_state, open_together
from holdfast.trainer.planning.compare_keys import Selection, shorten
from holdfast.trainer.ranks.collective import ControlGroup, agree
from holdfast.trainer.sources import find, tensors
from holdfast.trainer.sources.dcp import weights_in
from holdfast.trainer.state.train_state import TrainState

# A source of weights in the form that the checkpoint reader loads from.

# A tensor in another order is read as runs of elements that follow each other in the file.
RUNS_MAX: Final = 1 << 20

# The offsets, the sizes, the file, and the first byte of a box.
_Box = tuple[tuple[int, ...], tuple[int, ...], str, int]


def opened_from(source: tensors.WeightsSource) -> Opened:
    """Return the parts of a source as an opened checkpoint with the keys `model.<name>`.

    Raises `CheckpointError` for a tensor whose elements are scattered over the file.
    """
    numbers: dict[str, int] = {}
    boxes: dict[str, list[_Box]] = defaultdict(list)
    first: dict[str, tensors.SourcePart] = {}
    for part in source.parts:
        key = f"{tensors.MODEL}{part.name}"
        first.setdefault(key, part)
        boxes[key].extend(_boxes_of(part, source))
    by_key = {key: _table(found, first[key], numbers) for key, found in boxes.items()}
    metadata = dcp.Metadata(
        state_dict_metadata={
            key: dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=first[key].dtype),
                size=torch.Size(first[key].shape),
                # The reader takes the boxes from the table.
                chunks=list[dcp.ChunkStorageMetadata](),
            )
            for key in by_key
        },
        planner_data={},
        storage_data={},
    )
    extents = {path: state.bytes for path, state in source.files.items() if path in numbers}
    # These files contain the bytes alone, without the `torch.save` entries of DCP.
    table = BoxTable(tuple(numbers), by_key, extents, is_raw=True)
    return Opened(source.base, None, metadata, table, is_lean=True)


def _table(found: Sequence[_Box], part: tensors.SourcePart, numbers: dict[str, int]) -> SavedBoxes:
    """Return the boxes of one tensor as columns. New files get the next number."""
    dims, count = len(part.shape), len(found)
    offsets, sizes = (
        np.array([box[side] for box in found], np.int64).reshape(count, dims) for side in (0, 1)
    )
    files = [numbers.setdefault(path, len(numbers)) for _, _, path, _ in found]
    return SavedBoxes(
        offsets,
        sizes,
        np.array(files, np.int32),
        np.array([at for *_, at in found], np.int64),
        sizes.prod(axis=1) * part.dtype.itemsize,
    )


def _boxes_of(part: tensors.SourcePart, source: tensors.WeightsSource) -> Iterator[_Box]:
    """Yield boxes whose elements are consecutive in the file, in row-major order."""
    (segment,) = part.segments
    if part.strides is None:
        yield part.offsets, part.sizes, segment.path, segment.offset
        return
    # The longest stretch of neighbouring elements. A transposed matrix has one along its other
    # dimension.
    run = next((d for d, step in enumerate(part.strides) if step == 1 and part.sizes[d] > 1), None)
    counts = [1 if d == run else size for d, size in enumerate(part.sizes)]
    if prod(counts) > RUNS_MAX:
        raise CheckpointError(
            f"{source.place}: {part.name}: its elements are scattered over the file, in "
            f"{prod(counts)} runs; expected at most {RUNS_MAX}. Save it with .contiguous(), or "
            "import the file first, with `holdfast import`"
        )
    sizes = tuple(size if d == run else 1 for d, size in enumerate(part.sizes))
    for place in product(*map(range, counts)):
        at = sum(number * step for number, step in zip(place, part.strides, strict=True))
        offsets = tuple(a + b for a, b in zip(part.offsets, place, strict=True))
        yield offsets, sizes, segment.path, segment.offset + at * part.dtype.itemsize


def load_pretrained(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    exclude: str | Collection[str] = (),
) -> LoadReport:
    """Load weights from a safetensors directory, a torch file or a DCP directory into `model`.

    Every rank calls this, with its own part of a sharded model. Each byte is read once per node,
    straight into the parameters where their type allows it. Optimizers are not touched. A tied
    parameter needs only one of its names.

    Args:
        model: the model, or the parts of it that pipeline stages hold.
        directory: a folder or a file. Its form is detected.
        rename: names in the source mapped to names of this model, exactly or by prefix with
            `{"old.*": "new.*"}`. A `*` alone stands for every name: `{"*": "encoder.*"}`.
        strict: if False, names that only one side has are ignored and listed in the report.
        exclude: parameters, or prefixes of their names, that keep their values.

    In the report and in errors, the name of a parameter begins with `model.`. Raises
    `KeyMismatchError` before anything is loaded if names, shapes or kinds of types do not fit, or
    if a name in `exclude` or `rename` fits none,
    `CheckpointError` if the source is missing, damaged or of another form, and `TypeError` for
    another kind of model.
    """
    check_all(model, nn.Module, "model", "load_pretrained")
    check_path(directory, "directory")
    given = Selection.of(exclude=exclude, rename=rename, strict=strict)
    place, ranks = Path(directory).expanduser().absolute(), ControlGroup()
    try:
        state = TrainState(model, [], rank=ranks.rank, world_size=ranks.world_size)
        opened = _open(place, ranks)
        pick = replace(
            given,
            exclude=tensors.model_names(given.exclude),
            rename=tensors.model_rules(given.rename),
        )
        target, _ = agree(lambda: _target(state, opened, pick), ranks.group, lambda _: None)
        report = load_state(
            opened,
            target,
            group=ranks.group,
            strict=strict,
            exclude=pick.exclude,
            rename=pick.rename,
        )
        ranks.gather(lambda: state.put_back(target, strict=strict))
    finally:
        ranks.close()
    return report


def _open(place: Path, ranks: ControlGroup) -> Opened:
    """Open the source on all ranks. Rank 0 alone reads the headers of many files."""

    def read() -> tuple[str, Opened | None] | None:
        return _open_alone(place) if ranks.rank == 0 else None

    _, every = agree(read, ranks.group, lambda found: found)
    assert every[0] is not None
    form, opened = every[0]
    if form != find.DCP:
        assert opened is not None
        return opened
    found = open_together(place, ranks.group)
    names = {key: f"{tensors.MODEL}{name}" for key, name in weights_in(found)[0].items()}
    boxes = found.boxes.renamed(names)
    return replace(found, metadata=pick_entries(found.metadata, names), boxes=boxes)


def _open_alone(place: Path) -> tuple[str, Opened | None]:
    source = find.open_source(place, reads_dcp=False)
    if source.form == find.DEEPSPEED:
        raise CheckpointError(
            f"{place}: it is a DeepSpeed checkpoint, in which parameters are cut at any element; "
            "import it with `holdfast import`, and load the checkpoint that this makes"
        )
    return source.form, None if source.form == find.DCP else opened_from(source)


def _target(state: TrainState, opened: Opened, pick: Selection) -> dict[str, Any]:
    """Return the tensors to load into. Raises `KeyMismatchError` for types of another kind."""
    target = state.weights_template(opened.metadata, pick)
    saved = {pick.renamed(k): entry for k, entry in opened.metadata.state_dict_metadata.items()}
    odd = []
    for name, value in target["model"].items():
        entry = saved.get(f"{tensors.MODEL}{name}")
        if isinstance(entry, dcp.TensorStorageMetadata) and pick.takes(f"{tensors.MODEL}{name}"):
            kinds = _kind(entry.properties.dtype), _kind(value.dtype)
            if kinds[0] != kinds[1]:
                odd.append(f"{tensors.MODEL}{name}: {entry.properties.dtype} to {value.dtype}")
    if odd:
        raise KeyMismatchError(
            f"{opened.directory}: values would change their meaning: {shorten(odd)}; expected "
            "types of the same kind. Convert the tensors, or leave them out with exclude",
            reshaped=odd,
        )
    return target


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of a type. Values keep their meaning within a kind."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating-point"
    return "boolean" if dtype is torch.bool else "integer"
