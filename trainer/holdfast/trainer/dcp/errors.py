"""Errors of both Holdfast and stock DCP, so that existing handlers of a program catch them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _wrap_exception,
)

from holdfast.contracts.errors import CheckpointError, HoldfastError, SaveError

NAMED_MAX = 4


class DcpSaveError(SaveError, CheckpointException):
    """A save failed. All ranks raise it. `failures` has the errors of the ranks, by rank."""

    def __init__(self, message: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        CheckpointException.__init__(self, message, failures)

    def __str__(self) -> str:
        return str(self.args[0])


class DcpLoadError(CheckpointError, CheckpointException):
    """A load failed. All ranks raise it. `failures` has the errors of the ranks, by rank."""

    def __init__(self, message: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        CheckpointException.__init__(self, message, failures)

    def __str__(self) -> str:
        return str(self.args[0])


def portable(error: BaseException | None) -> WRAPPED_EXCEPTION | None:
    """Return an error in the form that is sent to other ranks, None without an error.

    An error that cannot be pickled becomes a `HoldfastError` with its text.
    """
    if error is None:
        return None
    wrapped = _wrap_exception(error)
    # Built-in errors can be pickled. Another class may need arguments that its pickle lacks.
    if type(error).__module__ == "builtins":
        return wrapped
    return HoldfastError(f"{type(error).__name__}: {error}"), wrapped[1]


def describe(failures: Mapping[int, WRAPPED_EXCEPTION]) -> str:
    shown = sorted(failures)[:NAMED_MAX]
    texts = [f"rank {rank}: {_text(failures[rank][0])}" for rank in shown]
    more = f" and {len(failures) - NAMED_MAX} more ranks" if len(failures) > NAMED_MAX else ""
    return "; ".join(texts) + more


def _text(error: BaseException) -> str:
    is_ours = isinstance(error, HoldfastError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
