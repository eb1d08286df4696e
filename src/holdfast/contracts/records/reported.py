"""Metrics that were reported for a checkpoint after its commit, by evaluations and by people.

Each is one journal line. The newest line about a metric of a checkpoint counts. It also counts
before a value that the program logged under the same name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.contracts.disk.bounds import REAL_MAX
from holdfast.contracts.disk.journal import NOT_FINITE, Event, EventKind, JournalWriter
from holdfast.contracts.disk.manifest import Manifest, read_manifest, read_tombstone
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.plain_text import counted

REPORT_MAX: Final = 1000
# A name is printed in tables and typed in specs.
_NAME: Final = re.compile(r"[^\s=,\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,200}")
_SHOWN: Final = 80


def reported_metrics(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return the reported metrics by the directory name of their checkpoint."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.kind is EventKind.METRIC:
            name = str(event.data["checkpoint"]).rpartition(":")[2]
            value = float(event.data["value"])
            found.setdefault(name, {})[event.data["metric"]] = value
    return found


def with_reported(manifests: Iterable[Manifest], events: Iterable[Event]) -> list[Manifest]:
    """Return the manifests, each with the metrics that were reported for its checkpoint."""
    reported = reported_metrics(events)
    return [
        one.model_copy(update={"metrics": {**one.metrics, **reported[one.name]}})
        if one.name in reported
        else one
        for one in manifests
    ]


def require_metrics(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as numbers; NaN and infinities are kept as what they are.

    Raises `SpecError` for a name or a value that is none.
    """
    if not given:
        raise SpecError("no metric was given; expected name=number, such as accuracy=0.91")
    if len(given) > REPORT_MAX:
        raise SpecError(f"{counted(len(given), 'metric')}, expected at most {REPORT_MAX}")
    return {_name(name): _number(name, value) for name, value in given.items()}


def read_number(text: str) -> float:
    """Return the number in a text. Raises `ValueError`, and `SpecError` for one above 1e308."""
    value = float(text)
    # Infinity itself is written as a word, without digits.
    if math.isinf(value) and any(one.isdecimal() for one in text):
        raise SpecError(f"{text[:_SHOWN]}: expected a number between -1e308 and 1e308")
    return value


def _name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"{ascii(name)[:_SHOWN]}: expected the name of a metric, of 1 to 200 characters "
            "without spaces, commas and '='"
        )
    return name


def _number(name: str, value: Any) -> float:
    # `True` is an integer in Python, and no measurement.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value in NOT_FINITE):
        raise SpecError(f"{name}: {ascii(value)[:_SHOWN]}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise SpecError(
            f"{name}: {value.bit_length()} bits: expected a number below 1e308"
        ) from None


def report(
    paths: RunPaths,
    checkpoint: str,
    metrics: Mapping[str, float],
    *,
    by: str,
    journal: JournalWriter,
    consumer: str = "",
) -> None:
    """Journal metrics of a checkpoint, one line for each. `consumer` is the spec's name for `by`.

    Raises `NotFoundError` if there is no such checkpoint, and none was deleted.
    """
    step = committed_step(paths, checkpoint)
    for number, (name, value) in enumerate(metrics.items(), 1):
        journal.append(
            EventKind.METRIC,
            # One sync makes all lines durable.
            durable=number == len(metrics),
            checkpoint=checkpoint,
            step=step,
            metric=name,
            value=_in_json(value),
            by=by,
            **({"consumer": consumer} if consumer else {}),
        )


def committed_step(paths: RunPaths, checkpoint: str) -> int:
    """Return the step of a checkpoint that was committed, even if it has been deleted since.

    Raises `NotFoundError` if it never was, and `DamagedCheckpointError` for a damaged manifest.
    """
    manifest = read_manifest(paths.checkpoint(checkpoint))
    if manifest is not None:
        return manifest.step
    # An evaluation may end after its checkpoint was deleted.
    if (found := read_tombstone(paths.tombstone(checkpoint))) is not None:
        return found.step
    raise NotFoundError(
        f"{checkpoint_id(paths.name, checkpoint)}: no committed checkpoint; `holdfast checkpoints "
        f"{paths.name}` lists them"
    )


def _in_json(value: float) -> float | str:
    """Return a number, or one that JSON does not have as text."""
    return value if abs(value) <= REAL_MAX else "nan" if math.isnan(value) else f"{value:g}"
