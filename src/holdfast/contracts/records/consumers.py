"""Consumers of checkpoints on disk: one folder for each start, and one journal line for each state.

`consumers/NNNN` of a run belongs to one start. `order.json` says what to run, `claim.json` is
created exclusively by the process that runs it, and `outcome.json` by the one that ends it. The
journal decides: a start without a line never happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import Field

from holdfast.contracts.disk.bounds import FilePath, Moment, Name, Number, Seconds, Step, Text
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import ConsumerPaths
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import ForeignFileError, SpecError
from holdfast.contracts.records.documents import Document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.reported import read_number, require_metrics
from holdfast.contracts.states import RunState

METRICS_BYTES_MAX: Final = 1 << 20


class ConsumerState(StrEnum):
    """What became of a consumer of one checkpoint."""

    DUE = "due"
    STARTED = "started"
    FAILED = "failed"
    DONE = "done"
    GIVEN_UP = "given_up"

    @property
    def is_open(self) -> bool:
        """Whether the checkpoint is still needed: the consumer works, or is started (again)."""
        return self not in {ConsumerState.DONE, ConsumerState.GIVEN_UP}

    @property
    def words(self) -> str:
        """The state as text."""
        return self.value.replace("_", " ")


_STATES: Final = frozenset(ConsumerState)


class ConsumerOrder(Document):
    """`order.json`: what one start of a consumer runs."""

    consumer: Name
    checkpoint: Name
    step: Step
    command: tuple[Text, ...] = ()
    deployment: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    working_directory: FilePath
    export: Name | None = None
    timeout_s: Seconds
    tries: Number = Field(description="1 for the first start for this checkpoint")
    is_job: bool = False
    created_at: Moment


class ConsumerOutcome(Document):
    """`outcome.json`: how one start of a consumer ended."""

    ending: Literal["done", "failed", "stopped"]
    reason: Text = ""
    exit_code: Number | None = None
    ended_at: Moment

    @classmethod
    def failed(cls, reason: str) -> ConsumerOutcome:
        """Return the outcome of a start that failed now."""
        return cls(ending="failed", reason=reason, ended_at=time.time())


@dataclass(frozen=True)
class Use:
    """The newest line about a consumer of a checkpoint. `start` is 0 before the first start."""

    consumer: str
    checkpoint: str
    state: ConsumerState
    start: int
    tries: int
    step: int
    at: float
    reason: str = ""


def uses_in(events: Iterable[Event]) -> dict[tuple[str, str], Use]:
    """Return the newest state of each consumer of each checkpoint."""
    lines = (event for event in events if event.kind is EventKind.CONSUMER)
    found = (use_in(event.data, event.time) for event in lines)
    return {(one.consumer, one.checkpoint): one for one in found if one is not None}


def use_in(facts: Mapping[str, Any], at: float) -> Use | None:
    """Return what a `consumer` line says; None if only a newer version knows its state."""
    if facts.get("state") not in _STATES:
        return None
    return Use(
        consumer=str(facts["consumer"]),
        checkpoint=str(facts["checkpoint"]),
        state=ConsumerState(facts["state"]),
        start=facts.get("start") or 0,
        tries=facts.get("tries") or 0,
        step=facts.get("step") or 0,
        at=at,
        reason=str(facts.get("reason") or ""),
    )


def open_uses(uses: Mapping[tuple[str, str], Use]) -> list[Use]:
    """Return what still needs its checkpoint, by step: what is tried again is not the last."""
    found = [one for one in uses.values() if one.state.is_open]
    return sorted(found, key=lambda one: (one.step, one.checkpoint, one.consumer))


def needs_supervisor(history: RunHistory) -> bool:
    """Return whether a run is live and not paused, or has open consumers.

    The order that continues a paused run starts a supervisor.
    """
    if history.state.is_live and history.state is not RunState.PAUSED:
        return True
    return bool(open_uses(uses_in(history.lines.of_kinds(EventKind.CONSUMER))))


def read_metrics(paths: ConsumerPaths) -> dict[str, float]:
    """Return the metrics in the file that a consumer wrote; empty without one.

    Raises `SpecError` if it contains anything but numbers by name.
    """
    try:
        content = read_bounded(paths.metrics_file, METRICS_BYTES_MAX, below=paths.directory)
    except FileNotFoundError:
        return {}
    except (OSError, ForeignFileError) as error:
        raise SpecError(f"its metrics cannot be read: {error}") from error
    try:
        found: Any = json.loads(content, parse_float=read_number)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"its metrics are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpecError("its metrics are not a table of numbers by name")
    return require_metrics(found) if found else {}
