"""A session for a loop of your own with Fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _unwrap_objects

from holdfast.contracts.errors import SpecError
from holdfast.trainer.session.session import Session

PRECISION: Final = "precision"
STRATEGIES: Final = (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)


def fabric_session(
    fabric: Any,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Session:
    """Return a `Session` over what `fabric.setup` returned, and resume.

    It takes Fabric's wrappers off, and adds the state of Fabric's precision, such as a loss scale.
    `options` are further arguments of `Session`. Raises `SpecError` for a strategy that is not
    supported, and what `Session` raises.
    """
    check_strategy(fabric.strategy)
    parts = dict(extra or {})
    if PRECISION in parts:
        raise SpecError(f"extra[{PRECISION!r}]: Holdfast uses this name for Fabric's precision")
    parts |= precision_of(fabric)
    return Session(_unwrapped(model), _unwrapped(optimizer), scheduler, extra=parts, **options)


def check_strategy(strategy: Any) -> None:
    """Raise `SpecError` for a strategy whose state Holdfast does not save here."""
    if not isinstance(strategy, STRATEGIES):
        raise SpecError(
            f"the strategy {type(strategy).__name__} is not supported; use one of "
            f"{', '.join(kind.__name__ for kind in STRATEGIES)}"
        )


def precision_of(fabric: Any) -> dict[str, Any]:
    """Return Fabric's precision by its name in a session, if it has a state such as a scale."""
    precision = fabric.strategy.precision
    return {PRECISION: precision} if precision.state_dict() else {}


def _unwrapped(given: Any) -> Any:
    if isinstance(given, Sequence):
        return [_unwrap_objects(each) for each in given]
    return None if given is None else _unwrap_objects(given)
