"""The orders of a run: what people and automations ask of it, as one numbered sequence.

All orders are lines of one journal, `journal/orders.jsonl`, and each is written under one lock,
`orders.lock`. The numbers of the lines give their order, and no clock does. A process that acts on
what it read, such as a supervisor that reserves an attempt, takes the same lock for that moment and
looks again. So an order is either seen before the act, or it sees the act.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol

from holdfast.contracts.disk import file_locks, journal_follow
from holdfast.contracts.disk.journal import FOREIGN_LOCK_S, Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import OrdersChangedError, RunConflictError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import OPERATOR_GOES_ON, RunHistory, order_number
from holdfast.contracts.states import AttemptState

ORDERS: Final = "orders"
# A process holds the lock for milliseconds.
TURN_S: Final = 30.0
# Orders about a checkpoint. They take effect when they are written.
_OF_CHECKPOINTS: Final = frozenset({EventKind.PINNED, EventKind.UNPINNED})
KINDS: Final = _OF_CHECKPOINTS | {EventKind.OPERATOR_REQUEST}
_ACTIONS: Final[dict[str, str]] = {EventKind.PINNED: "pin", EventKind.UNPINNED: "unpin"}


class OrderState(StrEnum):
    """The state of an order."""

    PENDING = "pending"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"
    OVERTAKEN = "overtaken"

    @property
    def is_open(self) -> bool:
        """True if the order has not been answered yet."""
        return self in {OrderState.PENDING, OrderState.TAKEN}


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order and its state. `at` is in Unix seconds of the clock of the process that took it.

    `detail` says why it is pending or failed, or which order overtook it.
    """

    number: int
    action: str
    by: str
    at: float
    gpus: int | None = None
    checkpoint: str | None = None
    reason: str = ""
    after_attempt: int = 0
    state: OrderState = OrderState.PENDING
    detail: str = ""

    @property
    def text(self) -> str:
        """The order in a few words, such as `relaunch at 8 GPUs by ann`."""
        size = f" at {counted(self.gpus, 'GPU')}" if self.gpus else ""
        name = f" {self.checkpoint}" if self.checkpoint else ""
        return f"{self.action}{name}{size} by {self.by}"


class OrderBook:
    """The orders of one run, while this process holds their lock."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.journal_of(ORDERS)

    @property
    def newest(self) -> int:
        """The number of the newest order; 0 if there is none."""
        # Read under the lock, so no other process can give an order with the next number.
        return max((order_number(event) for event in self._events()), default=0)

    def require(self, seen: int | None) -> None:
        """Raise `OrdersChangedError` if there is an order after number `seen`. None: no check."""
        # A lock during the decision would hold orders up for minutes, because the decision asks the
        # scheduler. So it is compared afterwards, see decision 85.
        newest = self.newest
        if seen is not None and newest != seen:
            raise OrdersChangedError(
                f"order {newest} was given after the run was last read, at order {seen}; the run "
                "is read again"
            )

    def ending(self, attempt: int) -> Event | None:
        """Return the newest request that was given when `attempt` was the newest attempt."""
        found = (
            event
            for event in reversed(self._events())
            if event.kind is EventKind.OPERATOR_REQUEST
            and (event.data.get("after_attempt") or 0) >= attempt
        )
        return next(found, None)

    def give(self, kind: EventKind, **facts: Any) -> int:
        """Write an order durably, and return its number."""
        # The number and not the time orders the lines: a clock 40 s ahead once made a `resume`
        # older than the `pause` before it, see decision 85.
        number = self.newest + 1
        with JournalWriter(self._path) as journal:
            journal.append(kind, order=number, **facts)
        return number

    def note(self, number: int, state: OrderState, detail: str) -> None:
        """Record why an order is pending or has failed, unless that is the newest record of it."""
        notes = [e.data for e in self._events() if _is_note_of(e, number)]
        facts: dict[str, Any] = {"order": number, "state": state.value, "detail": detail}
        if not notes or any(notes[-1].get(name) != value for name, value in facts.items()):
            with JournalWriter(self._path) as journal:
                journal.append(EventKind.ORDER_STATE, **facts)

    def _events(self) -> tuple[Event, ...]:
        return journal_follow.KEPT.read(self._path)


@contextlib.contextmanager
def open_orders(paths: RunPaths) -> Iterator[OrderBook]:
    """Hold the lock of the run's orders. Raises `RunConflictError` if another process keeps it."""
    # Another user's folder may have a lock that its owner holds on purpose.
    wait_s = TURN_S if paths.is_mine() else FOREIGN_LOCK_S
    with file_locks.locked(paths.orders_lock, wait_s) as is_locked:
        if not is_locked:
            raise RunConflictError(
                f"run {paths.name}: another process has kept {paths.orders_lock} locked for "
                f"{wait_s:.0f} s; find it with `fuser {paths.orders_lock}`"
            )
        yield OrderBook(paths)


class Attempted(Protocol):
    """What the state of an order needs to know about an attempt."""

    @property
    def number(self) -> int: ...
    @property
    def state(self) -> AttemptState: ...
    @property
    def job_id(self) -> str | None: ...


def orders_of(history: RunHistory) -> tuple[Order, ...]:
    """Return the orders of a run with their states, oldest first."""
    decision = history.last_decision or {}
    why = str(decision.get("reason") or "")
    return fold_orders(history.events, history.attempts, is_live=history.state.is_live, why=why)


def fold_orders(
    events: Iterable[Event], attempts: Sequence[Attempted], *, is_live: bool, why: str
) -> tuple[Order, ...]:
    """Return the orders among `events` with their states. `why` is the newest decision's reason."""
    lines = list(events)
    given = sorted((e for e in lines if e.kind in KINDS), key=order_number)
    notes = {e.data.get("order"): e.data for e in lines if e.kind is EventKind.ORDER_STATE}
    # Computed and never stored: a crash between an act and its record would leave a wrong state,
    # see decision 85.
    overtaken = {event.data.get("overtakes"): order_number(event) for event in given}
    found = []
    for event in given:
        order = _read(event)
        if order.number in overtaken:
            state, detail = OrderState.OVERTAKEN, f"by order {overtaken[order.number]}"
        else:
            state, detail = _judge(order, attempts, is_live=is_live, why=why)
        note = notes.get(order.number, {})
        if note.get("state") == OrderState.FAILED:
            state = OrderState.FAILED
        if state.is_open or state is OrderState.FAILED:
            detail = str(note.get("detail") or detail)
        found.append(replace(order, state=state, detail=detail))
    return tuple(found)


def _read(event: Event) -> Order:
    data = event.data
    return Order(
        number=order_number(event),
        action=_ACTIONS.get(event.kind) or str(data.get("action")),
        by=str(data.get("by") or "unknown"),
        at=event.time,
        gpus=data.get("gpus"),
        checkpoint=data.get("checkpoint"),
        reason=str(data.get("reason") or ""),
        after_attempt=int(data.get("after_attempt") or 0),
    )


def _judge(
    order: Order, attempts: Sequence[Attempted], *, is_live: bool, why: str
) -> tuple[OrderState, str]:
    """Return the state of an order that no other has overtaken, and the reason for it."""
    if order.checkpoint is not None:
        return OrderState.DONE, ""
    before = next((a for a in attempts if a.number == order.after_attempt), None)
    after = [a for a in attempts if a.number > order.after_attempt]
    if order.action in OPERATOR_GOES_ON:
        # Only a job is an answer. A reserved attempt may still be refused by the scheduler.
        if any(attempt.job_id is not None for attempt in after):
            return OrderState.DONE, ""
        if not is_live:
            return OrderState.FAILED, why
        is_stopping = before is not None and before.state is AttemptState.STOPPING
        return (OrderState.TAKEN if after or is_stopping else OrderState.PENDING), why
    if before is None or before.state.is_terminal:
        if before is not None and before.state is AttemptState.COMPLETED:
            return OrderState.FAILED, "the run completed first"
        return OrderState.DONE, ""
    is_stopping = before.state is AttemptState.STOPPING
    return (OrderState.TAKEN if is_stopping else OrderState.PENDING), ""


def _is_note_of(event: Event, number: int) -> bool:
    return event.kind is EventKind.ORDER_STATE and event.data.get("order") == number
