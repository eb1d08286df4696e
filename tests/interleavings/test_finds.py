"""The interleavings find what they are for: each guard of the real code is taken away in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from tests.interleavings.explore import Schedule, play, play_clock, schedules
from tests.interleavings.situations import Situations

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records import history
from holdfast.contracts.records.orders import OrderBook
from holdfast.flows.supervisor import supervise
from holdfast.workers.runs import operator

Guard = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def _no_second_look() -> Iterator[None]:
    """A reservation does not look at the orders again."""
    with (
        mock.patch.object(OrderBook, "require", return_value=None),
        mock.patch.object(OrderBook, "ending", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _no_precedence() -> Iterator[None]:
    """Holdfast's own requests are taken while a person's is pending, and the newest counts."""
    with (
        mock.patch.object(OrderBook, "require", return_value=None),
        mock.patch.object(operator, "_refuse_automatic", return_value=None),
        mock.patch.object(history, "AUTOMATIC", frozenset()),
    ):
        yield


@contextlib.contextmanager
def _leaves_without_lock() -> Iterator[None]:
    """A supervisor leaves without the lock of the orders."""
    with mock.patch.object(supervise, "open_orders", return_value=contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def _no_second_try() -> Iterator[None]:
    """Nobody tries again what the scheduler did not do."""
    with mock.patch.object(operator, "carry_out", return_value=""):
        yield


@contextlib.contextmanager
def _orders_by_time() -> Iterator[None]:
    """The times of orders give their order, and not their numbers."""

    def newest(self: history.RunHistory) -> dict[str, Any] | None:
        number = self.last_asked.number if self.last_asked else 0
        lines = [event for event in self.events if event.kind == EventKind.OPERATOR_REQUEST]
        pending = [e for e in lines if (e.data.get("after_attempt") or 0) >= number]
        return max(pending, key=lambda event: event.time).data if pending else None

    with mock.patch.object(history.RunHistory, "pending_request", property(newest)):
        yield


@pytest.mark.more
@pytest.mark.parametrize(
    ("guard", "situation", "flavour", "first", "second", "found"),
    [
        (_no_second_look, "crashed", "plain", "supervisor", "cancel", "cancel was accepted"),
        (_no_second_look, "crashed", "plain", "supervisor", "relaunch", "relaunch at 4 GPUs"),
        (_no_precedence, "queued", "fallback", "fallback", "cancel", "cancel was accepted"),
        (_no_precedence, "running", "grow", "grow", "pause", "pause was accepted"),
        (_leaves_without_lock, "failing", "plain", "supervisor", "relaunch", "nobody supervises"),
        (_no_second_try, "queued", "plain", "silent", "cancel", "cancel was accepted"),
    ],
)
def test_a_guard_that_is_missing_is_found(
    situations: Situations,
    guard: Callable[[], Guard],
    situation: str,
    flavour: str,
    first: str,
    second: str,
    found: str,
) -> None:
    every = list(schedules(situations, first, second, only=situation))
    assert {one.flavour for one in every} == {flavour}
    with guard():
        broken = next((p for one in every if (p := play(situations, one)).problems), None)
    assert broken is not None, f"none of {len(every)} schedules shows it"
    assert found in "; ".join(broken.problems)


@pytest.mark.parametrize("item", ["pause", "cancel"])
def test_an_order_by_a_clock_that_is_ahead_is_found(situations: Situations, item: str) -> None:
    schedule = Schedule("running", "plain", item, "clock", None, ("orders", 3600.0))
    assert not play_clock(situations, schedule).problems
    with _orders_by_time():
        assert "no attempt followed" in "; ".join(play_clock(situations, schedule).problems)
