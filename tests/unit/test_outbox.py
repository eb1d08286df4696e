"""Delivery of journal lines to a service that is slow, down, forgetful or strict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.history import load_events
from holdfast.flows.prefect_events import NAMES, event_name
from holdfast.flows.supervisor.outbox import (
    ASK_AFTER_S,
    BACK_OFF_S_MAX,
    RESEND_AFTER_S,
    SAVE_S,
    Outbox,
    OutboxLine,
    RefusedLineError,
)

UID = "5" * 32


class PlayedService:
    """A server that stores what it accepted when `store` is called, unless it is down."""

    batch_max = 50
    is_prompt = False
    advice = ""

    def __init__(self) -> None:
        self.accepted: list[OutboxLine] = []
        self.kept: list[OutboxLine] = []
        self.sendings: list[int] = []
        self.is_down = False
        self.refused: int | None = None

    def wants(self, event: Event) -> bool:
        return event.kind is not EventKind.NOTE

    def send(self, lines: Sequence[OutboxLine]) -> None:
        if self.is_down:
            raise ServiceError("down")
        if any(line.event.data.get("step") == self.refused for line in lines):
            raise RefusedLineError("never")
        self.sendings.append(len(lines))
        self.accepted += lines

    def stored(self, lines: Sequence[OutboxLine]) -> set[UUID]:
        if self.is_down:
            raise ServiceError("down")
        return {line.id for line in lines} & {line.id for line in self.kept}

    def store(self) -> None:
        self.kept, self.accepted = self.kept + self.accepted, []

    @property
    def steps(self) -> list[int | None]:
        return [line.event.data.get("step") for line in self.kept]


def each(take: Callable[[Event], None], folder: RunFolder) -> None:
    for event in load_events(folder.paths):
        take(event)


class Delivery:
    """A run's outbox, and the time."""

    def __init__(self, folder: RunFolder, service: PlayedService) -> None:
        self.problems: list[str] = []
        self.now = 100.0
        self.box = Outbox(
            folder.paths.deliveries / "played.json",
            UID,
            service,
            look=lambda take: each(take, folder),
            failed=lambda error: self.problems.append(f"failed: {error}"),
            refused=lambda error: self.problems.append(f"refused: {error}"),
        )

    def turn(self, after_s: float = 1.0) -> None:
        self.now += after_s
        self.box.turn(self.now)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, "kelp", UID)


def commit(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.tell("rank0", EventKind.COMMITTED, attempt=1, checkpoint=f"c{step}", step=step)


def test_each_line_comes_once_and_in_order(folder: RunFolder) -> None:
    service = PlayedService()
    delivery = Delivery(folder, service)
    commit(folder, 1, 2)
    folder.tell("rank0", EventKind.NOTE, text="not wanted")
    delivery.turn()
    service.store()
    commit(folder, 3)
    delivery.turn()
    delivery.turn()
    service.store()
    assert service.steps == [1, 2, 3]
    assert service.sendings == [2, 1]
    times = [line.at for line in service.kept]
    assert times == sorted(set(times))
    assert len({line.id for line in service.kept}) == 3


def test_outage_delays_lines_and_loses_none(folder: RunFolder) -> None:
    service = PlayedService()
    service.is_down = True
    delivery = Delivery(folder, service)
    for step in range(1, 6):
        commit(folder, step)
        delivery.turn()
    assert delivery.problems == ["failed: down"], "one warning for an outage"
    service.is_down = False
    delivery.turn(BACK_OFF_S_MAX)
    service.store()
    assert service.steps == [1, 2, 3, 4, 5]


def test_line_that_the_service_accepted_and_lost_is_sent_again(folder: RunFolder) -> None:
    service = PlayedService()
    delivery = Delivery(folder, service)
    commit(folder, 1, 2)
    delivery.turn()
    service.kept, service.accepted = service.accepted[1:], []
    delivery.turn(ASK_AFTER_S)
    assert service.accepted == [], "it may still store the line"
    delivery.turn(RESEND_AFTER_S)
    delivery.turn()
    service.store()
    delivery.turn(ASK_AFTER_S)
    assert service.steps == [2, 1]


@pytest.mark.parametrize("has_lost_one", [False, True])
def test_next_supervisor_sends_only_what_the_service_lacks(
    folder: RunFolder, has_lost_one: bool
) -> None:
    """The first one is killed right after it has sent lines, and before it knows of their fate."""
    service = PlayedService()
    commit(folder, 1, 2, 3)
    Delivery(folder, service).turn()
    if has_lost_one:
        service.accepted.pop(1)
    service.store()
    commit(folder, 4)
    again = Delivery(folder, service)
    again.turn()
    assert service.sendings == [3]
    again.turn(ASK_AFTER_S)
    again.turn(RESEND_AFTER_S)
    again.turn()
    service.store()
    again.turn(ASK_AFTER_S)
    assert sorted(service.steps, key=str) == [1, 2, 3, 4]
    assert service.sendings[1:] == [2 if has_lost_one else 1]
    again.turn(SAVE_S)
    third = Delivery(folder, service)
    third.turn(ASK_AFTER_S + RESEND_AFTER_S)
    third.turn(RESEND_AFTER_S)
    assert len(service.sendings) == 2, "the file says that all is delivered"


def test_refused_line_does_not_hold_up_the_others(folder: RunFolder) -> None:
    service = PlayedService()
    service.refused = 2
    delivery = Delivery(folder, service)
    commit(folder, 1, 2, 3)
    delivery.turn()
    commit(folder, 4)
    delivery.turn()
    service.store()
    assert service.steps == [1, 3, 4]
    assert delivery.problems == ["refused: never"]


def test_damaged_file_costs_no_line(folder: RunFolder) -> None:
    service = PlayedService()
    commit(folder, 1)
    Delivery(folder, service).turn()
    service.store()
    (folder.paths.deliveries / "played.json").write_text("{")
    commit(folder, 2)
    again = Delivery(folder, service)
    again.turn()
    again.turn(ASK_AFTER_S)
    again.turn(RESEND_AFTER_S)
    again.turn()
    service.store()
    assert service.steps == [1, 2]


def test_end_of_the_run_waits_for_the_service(folder: RunFolder) -> None:
    class Quick(PlayedService):
        def send(self, lines: Sequence[OutboxLine]) -> None:
            super().send(lines)
            self.store()

    service = Quick()
    box = Delivery(folder, service).box
    commit(folder, 1)
    box.offer()
    assert box.close(30)
    commit(folder, 2)
    box.offer()
    assert box.close(30), "a run can continue after its end"
    service.is_down = True
    commit(folder, 3)
    box.offer()
    assert not box.close(0.5)
    assert service.steps == [1, 2]


def test_names_say_what_happened() -> None:
    def name(kind: EventKind, **facts: object) -> str:
        line = {"writer": "w", "opening": 1, "sequence": 0, "time": 1.0, "kind": kind}
        return event_name(Event.model_validate({**line, "data": facts}))

    assert name(EventKind.VERIFIED, ok=True) == "holdfast.checkpoint.verified"
    assert name(EventKind.VERIFIED, ok=False) == "holdfast.checkpoint.damaged"
    assert name(EventKind.RUN_ENDED, state="failed") == "holdfast.run.failed"
    assert name(EventKind.ATTEMPT_STATE, state="timed_out") == "holdfast.attempt.timed-out"
    assert name(EventKind.SIGNAL, cause="preemption") == "holdfast.preemption.noticed"
    assert name(EventKind.SIGNAL, cause="time_limit") == "holdfast.attempt.stopping"
    assert name(EventKind.STAGED) == ""
    assert set(NAMES) <= set(EventKind)
