"""A checkpoint into a model, outside of a run: for evaluation, for export, for a fork's start."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.leases import reading
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths, default_root
from holdfast.trainer.collective import ControlGroup
from holdfast.trainer.loading.compare_keys import Selection
from holdfast.trainer.loading.reader import LoadReport, load_state, open_any_together
from holdfast.trainer.loading.train_state import read_train_state
from holdfast.trainer.planning.metadata import Opened
from holdfast.trainer.state.train_state import TrainState

PARTS: Final = ("model", "optimizer")


def load_checkpoint(
    checkpoint: str | Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a checkpoint, ours or stock DCP's, into `model` and `optimizer`, at any world size.

    Every rank calls it, with its own part of a sharded model. `checkpoint` is a directory, or an
    id `<run>:<step-…>` under `$HOLDFAST_ROOT`. Keys are `model.<name>`,
    `optimizer.state.<name>.<key>` and `optimizer.param_groups.<name>.<key>`.

    Args:
        checkpoint: what to load.
        model: the model, or its parts as pipeline stages hold them.
        optimizer: left as it is when not given; then only the model is loaded.
        exclude: keys or beginnings of keys that keep their values, such as "optimizer" or
            "model.head"; of a parameter, its optimizer state keeps its values too.
        include: when given, only these are loaded.
        rename: saved keys to those of this model, `{"model.old.*": "model.new.*"}`; the
            optimizer state of renamed parameters follows.
        strict: when False, keys that only one side has are left alone and named in the report.

    Raises `KeyMismatchError` before anything is loaded when keys or shapes do not fit,
    `DamagedCheckpointError` when bytes are not those that were committed (the model may have
    been changed by then), `NotFoundError` when there is no such checkpoint, and `TypeError` for a
    target of another type, such as a dict of tensors.
    """
    _check_all(model, nn.Module, "model")
    _check_all(() if optimizer is None else optimizer, Optimizer, "optimizer")
    directory = find_directory(checkpoint)
    ranks = ControlGroup()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    parts = PARTS if optimizers else PARTS[:1]
    state = TrainState(model, optimizers, rank=ranks.rank, world_size=ranks.world_size)
    try:
        with _held(directory, ranks):
            pick = Selection(tuple(include or parts), tuple(exclude), dict(rename or {}), strict)
            opened = open_any_together(directory, ranks.group)
            made: list[dict[str, Any]] = []
            ranks.gather(lambda: made.append(_target(state, opened, pick)))
            report = load_state(
                opened,
                made[0],
                group=ranks.group,
                strict=strict,
                include=include or parts,
                exclude=exclude,
                rename=rename,
            )
        ranks.gather(lambda: state.put_back(made[0]))
    finally:
        if ranks.group is not None:
            dist.destroy_process_group(ranks.group)
    return report


def _check_all(given: object, kind: type, name: str) -> None:
    """`TypeError` unless `given` is a `kind` or a sequence of them."""
    if isinstance(given, kind):
        return
    if isinstance(given, Sequence) and not isinstance(given, str):
        wrong = [type(one).__name__ for one in given if not isinstance(one, kind)]
        if not wrong:
            return
        words = f"a {type(given).__name__} that contains {wrong[0]}"
    else:
        words = f"an object of type {type(given).__name__}"
    raise TypeError(
        f"load_checkpoint: {name} is {words}; expected a torch {kind.__name__} or a sequence of "
        "them. To load into a nested dict of tensors, call "
        "holdfast.trainer.loading.reader.load_state(Path(directory), state, group=None)"
    )


def _target(state: TrainState, opened: Opened, pick: Selection) -> dict[str, Any]:
    """What to load into, the optimizer's state that only the checkpoint has among it."""
    document = read_train_state(opened.directory, opened.manifest)
    return state.tensors(lambda: opened.metadata, pick, document)


@contextlib.contextmanager
def _held(directory: Path, ranks: ControlGroup) -> Iterator[None]:
    """Keep a run's checkpoint from deletion while all ranks load it; rank 0 has the lease.

    A directory of any other name is nobody's to delete, and what lies beside it is not ours.
    """
    is_ours = CheckpointName.parse(directory.name) is not None
    with contextlib.ExitStack() as held:
        if is_ours and ranks.rank == 0:
            held.enter_context(reading(directory))
        # No rank reads before the lease stands; loading ends with a word from every rank.
        ranks.gather(lambda: check_committed(directory) if is_ours else None)
        yield


def check_committed(directory: Path) -> None:
    """`NotFoundError` for a run's save without a manifest, by which alone it could be verified.

    Without this it would be taken for one of stock DCP, which has none. To be called under the
    lease: who deletes takes the manifest first, and puts it back when a lease came in between.
    """
    is_of_run = RunPaths(directory.parent.parent).spec.exists()
    if is_of_run and not (directory / MANIFEST).exists():
        raise NotFoundError(
            f"{directory}: it has no {MANIFEST}, so it was never committed or is being deleted; "
            "load another checkpoint of the run"
        )


def find_directory(checkpoint: str | Path) -> Path:
    """The directory of a checkpoint given by its path or id; `NotFoundError` if there is none."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        # A link such as `latest` is not the name that its manifest has.
        return path.resolve()
    run, _, name = str(checkpoint).rpartition(":")
    if run and CheckpointName.parse(name):
        path = RunPaths(default_root() / run).checkpoint(name)
        if path.is_dir():
            return path
    raise NotFoundError(
        f"{checkpoint}: no such checkpoint ({path}); expected a directory, or an id <run>:<step-…> "
        f"under {default_root()}, which HOLDFAST_ROOT changes"
    )
