"""Load pretrained weights of another program into a model, at any world size and sharding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer.arguments import check_path
from holdfast.trainer.format.metadata import Opened, pick_entries
from holdfast.trainer.loading.agreement import agree
from holdfast.trainer.loading.checkpoint import check_all
from holdfast.trainer.loading.reader import LoadReport, load_state, open_any_together
from holdfast.trainer.planning.compare_keys import Selection, shorten
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.sources.boxes import opened_from
from holdfast.trainer.sources.dcp import weights_in
from holdfast.trainer.sources.find import DCP, DEEPSPEED, open_source
from holdfast.trainer.sources.tensors import MODEL, model_names, model_rules
from holdfast.trainer.state.train_state import TrainState


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
        directory: a folder or a file. Its form is found by itself.
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
        pick = replace(given, exclude=model_names(given.exclude), rename=model_rules(given.rename))
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
    if form != DCP:
        assert opened is not None
        return opened
    found = open_any_together(place, ranks.group)
    names = {key: f"{MODEL}{name}" for key, name in weights_in(found)[0].items()}
    boxes = found.boxes.renamed(names)
    return replace(found, metadata=pick_entries(found.metadata, names), boxes=boxes)


def _open_alone(place: Path) -> tuple[str, Opened | None]:
    source = open_source(place, reads_dcp=False)
    if source.form == DEEPSPEED:
        raise CheckpointError(
            f"{place}: it is a DeepSpeed checkpoint, in which parameters are cut at any element; "
            "import it with `holdfast import`, and load the checkpoint that this makes"
        )
    return source.form, None if source.form == DCP else opened_from(source)


def _target(state: TrainState, opened: Opened, pick: Selection) -> dict[str, Any]:
    """Return the tensors to load into. Raises `KeyMismatchError` for types of another kind."""
    target = state.weights_template(opened.metadata, pick)
    saved = {pick.renamed(k): entry for k, entry in opened.metadata.state_dict_metadata.items()}
    odd = []
    for name, value in target["model"].items():
        entry = saved.get(f"{MODEL}{name}")
        if isinstance(entry, TensorStorageMetadata) and pick.takes(f"{MODEL}{name}"):
            kinds = _kind(entry.properties.dtype), _kind(value.dtype)
            if kinds[0] != kinds[1]:
                odd.append(f"{MODEL}{name}: {entry.properties.dtype} to {value.dtype}")
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
