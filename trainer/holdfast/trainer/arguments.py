"""Checks of what a program passes to a `Session`. Each error names the parameter and the value.

A wrong type raises `TypeError`. A value that is out of bounds raises `SpecError`, a `ValueError`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh

from holdfast.contracts.errors import SpecError
from holdfast.trainer.metrics import RESERVED

BETTER: Final = ("min", "max")
# Those of `torch.manual_seed`.
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1
COUNT_MAX: Final = 1 << 62
_STATEFUL: Final = ("state_dict", "load_state_dict")


def check_program(
    model: object, optimizer: object, scheduler: object, extra: object, per_rank: object
) -> None:
    """Raise `TypeError` for an object of the program that is of another kind than expected."""
    _check_model(model)
    _check_stateful(optimizer, "optimizer")
    _check_stateful(scheduler, "scheduler")
    _check_named(extra, "extra")
    _check_named(per_rank, "per_rank")


def _check_model(given: object) -> None:
    """Raise `TypeError` unless `given` is a module or several."""
    for each in [given] if isinstance(given, nn.Module) else _several(given, "model"):
        if not isinstance(each, nn.Module):
            raise _wrong("model", given, "a torch Module, or a list of the parts of one model")


def _check_stateful(given: object, name: str) -> None:
    """Raise `TypeError` unless `given` is None, an object with a state, or several."""
    if given is None or _has_state(given):
        return
    if not all(map(_has_state, _several(given, name))):
        raise _wrong(name, given, f"an object with {' and '.join(_STATEFUL)}, or a list of them")


def _check_named(given: object, name: str) -> None:
    """Raise `TypeError` unless `given` is None or a mapping of names to objects."""
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise _wrong(name, given, "a mapping of names to objects")


def check_kinds(*, mesh: object, planner: object, directory: object) -> None:
    """Raise `TypeError` or `SpecError` for the options that are objects of one type, or None."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise _wrong("mesh", mesh, "a DeviceMesh of all ranks")
    if planner is not None and not isinstance(planner, SavePlanner):
        raise _wrong("planner", planner, "a SavePlanner")
    if directory is not None:
        check_path(directory, "directory")


def check_path(given: object, name: str) -> None:
    """Raise `TypeError` or `SpecError` unless `given` is a path that is not empty."""
    if not isinstance(given, str | Path):
        raise _wrong(name, given, "a path as text or a Path")
    if not str(given):
        raise SpecError(f"{name}={given!r}: expected a path")


def check_seed(given: object) -> int:
    """Return a seed as an int. Raises `TypeError` or `SpecError`."""
    return whole(given, "seed", least=SEED_MIN, most=SEED_MAX)


def check_best(best: object) -> None:
    """Raise unless `best` is a metric's name and one of `BETTER`, or None."""
    if best is None:
        return
    wanted = f"a metric's name and one of {BETTER}"
    if not isinstance(best, Sequence) or isinstance(best, str | bytes):
        raise _wrong("best", best, wanted)
    if len(best) != 2 or not isinstance(best[0], str) or best[1] not in BETTER:
        raise SpecError(f"best={best!r}: expected {wanted}")
    if best[0] in RESERVED:
        raise SpecError(f"best={best!r}: no metric can have this name, so there is no best value")


def whole(value: Any, name: str, *, least: int = 0, most: int = COUNT_MAX) -> int:
    """Return a whole number. A bool is none, and neither is a float, whatever its value."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise _wrong(name, value, "a whole number")
    if not least <= number <= most:
        raise SpecError(f"{name}={number}: expected {least} to {most}")
    return number


def truth(value: object, name: str) -> bool:
    """Return a bool. Raises `TypeError` for everything else."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def _several(given: object, name: str) -> Sequence[object]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise _wrong(name, given, "an object of torch, or a list of them")
    return given


def _has_state(given: object) -> bool:
    return not isinstance(given, type) and all(hasattr(given, one) for one in _STATEFUL)


def _wrong(name: str, given: object, wanted: str) -> TypeError:
    text = repr(given)
    shown = text if len(text) <= 80 else f"<{type(given).__name__}>"
    return TypeError(f"{name}={shown}: expected {wanted}")
