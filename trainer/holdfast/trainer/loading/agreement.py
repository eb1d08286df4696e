"""Errors while loading: what one rank raises, all ranks raise, by one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from holdfast.contracts.errors import (
    CheckpointError,
    DamagedCheckpointError,
    HoldfastError,
    KeyMismatchError,
    MirrorError,
)
from holdfast.trainer.ranks.collective import attempt
from holdfast.trainer.ranks.rank_tree import RankTree

T = TypeVar("T")
W = TypeVar("W")
PortableError = tuple[str, str, dict[str, Any]]
_KINDS: Final[dict[str, Callable[..., CheckpointError]]] = {
    kind.__name__: kind for kind in (DamagedCheckpointError, KeyMismatchError, MirrorError)
}


def agree(act: Callable[[], T], tree: RankTree, describe: Callable[[T], W]) -> tuple[T, list[W]]:
    """Return the result of `act`, and every rank's `describe` of its result, by one collective.

    If `act` raised on any rank, all ranks raise the first error.
    """
    value, error = attempt(act)
    own = None if error is not None else describe(cast(T, value))
    gathered = tree.gather_all((portable(error), own))
    raise_first(error, [one for one, _ in gathered])
    return cast(T, value), [cast(W, each) for _, each in gathered]


def raise_first(error: Exception | None, errors: Sequence[PortableError | None]) -> None:
    """Raise the first of all ranks' `errors` on every rank. `error` is this rank's own."""
    rank, first = next(((r, one) for r, one in enumerate(errors) if one is not None), (0, None))
    if first is None:
        return
    kind, text, details = first
    if isinstance(error, HoldfastError) and type(error).__name__ == kind:
        raise error
    made = _KINDS.get(kind, CheckpointError)
    raise made(f"rank {rank}: not loaded: {kind}: {text}", **details) from error


def portable(error: Exception | None) -> PortableError | None:
    """Return an error in the form that is sent to other ranks: kind, message and details."""
    return None if error is None else (type(error).__name__, str(error), _details(error))


def _details(error: Exception) -> dict[str, Any]:
    """Return the attributes of a checkpoint error besides its message."""
    names = ("damaged", "missing", "extra", "reshaped", "is_passing")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}
