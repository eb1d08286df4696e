"""Load a checkpoint into a model outside a run: for evaluation, for export, or to start a fork."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from holdfast.contracts.disk import filesystems, leases
from holdfast.contracts.disk.paths import (
    MANIFEST,
    CheckpointName,
    RunPaths,
    default_root,
    plain_checkpoint,
)
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records import checkpoint_choice, known_damage
from holdfast.trainer.arguments import check_path
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.loading.reader import LoadReport, load_state, open_together
from holdfast.trainer.planning.compare_keys import Selection
from holdfast.trainer.planning.layout import read_train_state
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.state.imported import is_imported
from holdfast.trainer.state.train_state import TrainState

PARTS: Final = ("model", "optimizer")


def load_checkpoint(
    checkpoint: str | Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    exclude: str | Collection[str] = (),
    include: str | Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a Holdfast or stock DCP checkpoint into `model` and `optimizer`, at any world size.

    Every rank calls this, with its own part of a sharded model. `checkpoint` is a directory, or an
    id `<run>:<step-…>`, `<run>:latest` or `<run>:best` under `$HOLDFAST_ROOT`. Keys are
    `model.<name>`, `optimizer.state.<name>.<key>` and `optimizer.param_groups.<name>.<key>`.

    Args:
        checkpoint: the checkpoint to load.
        model: the model, or the parts of it that pipeline stages hold.
        optimizer: one, several, or none. Without it, only the model is loaded.
        exclude: a key or key prefix that keeps its current values, such as "optimizer" or
            "model.head", or several. An excluded parameter also keeps its optimizer state.
        include: if given, only these keys or key prefixes are loaded.
        rename: saved keys mapped to keys of this model, `{"model.old.*": "model.new.*"}`. The
            optimizer state of a renamed parameter follows.
        strict: if False, keys that only one side has are ignored and listed in the report.

    Raises `KeyMismatchError` before anything is loaded if keys or shapes do not fit, or if a name
    in `exclude`, `include` or `rename` fits no key. Raises
    `DamagedCheckpointError` if bytes differ from the committed ones; the model may then have
    changed. Raises `NotFoundError` if there is no such checkpoint, and `TypeError` for a target of
    another type, such as a dict of tensors.
    """
    given = Selection.of(include=include, exclude=exclude, rename=rename, strict=strict)
    check_path(checkpoint, "checkpoint")
    check_all(model, nn.Module, "model")
    check_all(() if optimizer is None else optimizer, Optimizer, "optimizer")
    ranks = ControlGroup()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    parts = PARTS if optimizers else PARTS[:1]
    try:
        directory = _choose(checkpoint, ranks)
        state = TrainState(model, optimizers, rank=ranks.rank, world_size=ranks.world_size)
        with _held(directory, ranks):
            pick = replace(given, include=given.include or parts)
            opened = open_together(directory, ranks.group)
            made: list[dict[str, Any]] = []
            ranks.gather(lambda: made.append(_target(state, opened, pick)))
            report = load_state(
                opened,
                made[0],
                group=ranks.group,
                strict=strict,
                include=pick.include,
                exclude=pick.exclude,
                rename=pick.rename,
            )
        ranks.gather(lambda: state.put_back(made[0], strict=strict))
    finally:
        ranks.close()
    return report


def check_all(given: object, kind: type, name: str, caller: str = "load_checkpoint") -> None:
    """Raise `TypeError` unless `given` is a `kind` or a sequence of them."""
    if isinstance(given, kind):
        return
    if isinstance(given, Sequence) and not isinstance(given, str):
        wrong = [type(one).__name__ for one in given if not isinstance(one, kind)]
        if not wrong:
            return
        found = f"a {type(given).__name__} that contains {wrong[0]}"
    else:
        found = f"an object of type {type(given).__name__}"
    raise TypeError(
        f"{caller}: {name} is {found}; expected a torch {kind.__name__} or a sequence of "
        "them. To load into a nested dict of tensors, call "
        "holdfast.trainer.loading.reader.load_state(Path(directory), state, group=None)"
    )


def _target(state: TrainState, opened: Opened, pick: Selection) -> dict[str, Any]:
    """Return the state to load into, including optimizer state that only the checkpoint has."""
    document = read_train_state(opened.directory, opened.manifest)
    target = state.tensors(lambda: opened.metadata, pick, document)
    if is_imported(document):
        state.leave_ties_out(target, opened.metadata, pick)
    return target


@contextlib.contextmanager
def _held(directory: Path, ranks: ControlGroup) -> Iterator[None]:
    """Protect a run's checkpoint from deletion while all ranks load it. Rank 0 holds the lease.

    Holdfast never deletes a directory with another kind of name, so that needs no lease.
    """
    is_ours = CheckpointName.parse(directory.name) is not None
    with contextlib.ExitStack() as held:
        if is_ours and ranks.rank == 0:
            held.enter_context(leases.reading(directory))
        # No rank reads before the lease exists. Loading ends with a collective of all ranks.
        ranks.gather(lambda: _check(directory, ranks) if is_ours else None)
        yield


def _check(directory: Path, ranks: ControlGroup) -> None:
    check_committed(directory)
    if ranks.rank == 0:
        known_damage.refuse_damaged(RunPaths(directory.parent.parent), directory.name, "load it")


def check_committed(directory: Path) -> None:
    """Raise `NotFoundError` for a run's save without a manifest, which cannot be verified.

    Without this check it would be read as a stock DCP checkpoint, which has no manifest. Call it
    under the lease. A deletion removes the manifest first, and restores it if a lease appeared.
    """
    is_of_run = RunPaths(directory.parent.parent).spec.exists()
    if is_of_run and not filesystems.is_there(directory / MANIFEST):
        raise NotFoundError(
            f"{directory}: it has no {MANIFEST}, so it was never committed or is being deleted; "
            "load another checkpoint of the run"
        )


def _choose(checkpoint: str | Path, ranks: ControlGroup) -> Path:
    """Return the directory that rank 0 finds: `latest` may become another checkpoint meanwhile.

    Raises `NotFoundError` on all ranks.
    """

    def find() -> tuple[Path | None, str]:
        try:
            return find_directory(checkpoint), ""
        except NotFoundError as error:
            return None, str(error)

    directory, problem = ranks.share(find)
    if directory is None:
        raise NotFoundError(problem)
    return directory


def find_directory(checkpoint: str | Path) -> Path:
    """Return the directory of a checkpoint's path or id. Raises `NotFoundError` without one."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        # The name of a link such as `latest` differs from the manifest's.
        plain = plain_checkpoint(path)
        return plain if CheckpointName.parse(plain.name) else path.resolve()
    run, _, name = str(checkpoint).rpartition(":")
    paths = RunPaths(default_root() / run)
    is_whole = CheckpointName.parse(name) is not None
    # Without Holdfast around it, a run has no record to read.
    if run and (is_whole or (checkpoint_choice.is_checkpoint(name) and paths.spec.is_file())):
        path = paths.checkpoint(checkpoint_choice.choose_checkpoint(paths, name))
        if path.is_dir():
            return path
    raise NotFoundError(
        f"{checkpoint}: no such checkpoint ({path}); expected a directory, or an id <run>:<step-…> "
        f"under {default_root()}, which HOLDFAST_ROOT changes"
    )
