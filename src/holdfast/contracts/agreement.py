"""The stop agreement: every rank leaves after the same step, or all train on.

A coordinator (node 0's stop coordinator) proposes a step S to every node; a node refuses when one
of its ranks is past S already. All accept: GO, and each rank leaves after S. One refuses: ABORT,
all train on, and a later S is proposed. Nobody waits at S while another rank is inside S+1's
collectives, because such a rank makes its node refuse and the refusal frees the others.

Two-phase agreement with an abort, after the classic commit protocols; the only novelty is that
a rank's vote is a word in shared memory, so ordinary steps pay nothing for it.

A save out of turn is agreed in the same way: with SAVE for GO, ranks save together after S and
train on. Nothing else may be proposed until every rank has entered a step after S, for a rank
that missed the word would leave the others waiting in the save's collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.rank_status import AT_START, NOWHERE, Proposal, RankRecord, RankStatusTable

ROUNDS_MAX: Final = 24
MARGINS: Final = (0, 1, 1, 2, 2, 4)
ANSWER_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.0005

T = TypeVar("T")


class NodePort(Protocol):
    """One node as the coordinator sees it; a call may cross a network and is bounded."""

    def newest_entered(self) -> int:
        """The newest step that a rank of the node has entered, `NOWHERE` for none."""
        ...

    def propose(self, serial: int, step: int) -> bool:
        """Put a proposal to the node's ranks; False when one of them is past `step`."""
        ...

    def answer(self, serial: int, state: Proposal) -> None:
        """Tell the node's ranks `GO`, `SAVE` or `ABORT`."""
        ...


class StatusPort:
    """The coordinator's own node."""

    def __init__(self, status_table: RankStatusTable) -> None:
        self._status_table = status_table

    def newest_entered(self) -> int:
        return self._status_table.newest_entered

    def propose(self, serial: int, step: int) -> bool:
        self._status_table.propose(serial, step)
        return self._status_table.accepts(serial, step)

    def answer(self, serial: int, state: Proposal) -> None:
        self._status_table.answer(serial, state)


class AskAll(Protocol):
    """Asks every port the same, and returns the answers in the ports' order.

    Raises `ConnectionError` when one is lost, `AgreementError` when one does not answer in time.
    Every port has been asked then.
    """

    def __call__(self, ports: Sequence[NodePort], ask: Callable[[NodePort], T], /) -> list[T]: ...


def ask_in_turn(ports: Sequence[NodePort], ask: Callable[[NodePort], T]) -> list[T]:
    """One port after another: for few of them."""
    answers: list[T] = []
    problem: ConnectionError | None = None
    for port in ports:
        try:
            answers.append(ask(port))
        except ConnectionError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return answers


def agree_on_step(
    ports: Sequence[NodePort],
    *,
    first_serial: int = 1,
    word: Proposal = Proposal.GO,
    ask_all: AskAll = ask_in_turn,
) -> tuple[int, int]:
    """Bring all nodes to one step; returns (step, rounds). `AT_START` means before any step.

    `word` is what ranks are told that wait there: `GO` to leave, `SAVE` to save and train on.

    Raises `AgreementError` when `ROUNDS_MAX` proposals were refused or a node did not answer in
    time, and `ConnectionError` when a node is lost; ranks that waited have then been told to train
    on, where they can be reached.
    """
    newest = NOWHERE
    for round_number in range(ROUNDS_MAX):
        serial = first_serial + round_number
        before, newest = newest, max(ask_all(ports, lambda port: port.newest_entered()))
        step = AT_START if newest == NOWHERE else newest + _margin(round_number, before, newest)
        # Every node is asked even after a refusal, so that all status tables bear the same serial.
        try:
            accepted = ask_all(ports, partial(_propose, serial=serial, step=step))
        except (ConnectionError, AgreementError):
            with contextlib.suppress(ConnectionError, AgreementError):
                ask_all(ports, partial(_answer, serial=serial, verdict=Proposal.ABORT))
            raise
        verdict = word if all(accepted) else Proposal.ABORT
        # A node that is slow to confirm it has been told all the same.
        with contextlib.suppress(AgreementError):
            ask_all(ports, partial(_answer, serial=serial, verdict=verdict))
        if verdict is word:
            return step, round_number + 1
    raise AgreementError(
        f"no common step in {ROUNDS_MAX} proposals, the last after step {step}: a rank was "
        "always past it. The newest step that every rank staged will be committed instead"
    )


def _margin(refused: int, before: int, newest: int) -> int:
    """How many steps ahead of the newest one to propose, after so many refusals.

    Few, for ranks train on until then; but as many as ranks ran during the refused round, from
    `before` to `newest`: steps shorter than a round's way over the network outrun any fixed number.
    """
    ran = newest - before if before > NOWHERE else 0
    return MARGINS[min(refused, len(MARGINS) - 1)] + ran


def _propose(port: NodePort, serial: int, step: int) -> bool:
    return port.propose(serial, step)


def _answer(port: NodePort, serial: int, verdict: Proposal) -> None:
    port.answer(serial, verdict)


def consider(status_table: RankStatusTable, record: RankRecord, completed: int) -> Proposal:
    """What a rank does at the boundary after `completed`: `GO`, leave; `SAVE`, save with all
    others and train on; `NONE`, train on.

    Called when `RankRecord.cross` found a proposal. Raises `AgreementError` when the stop
    coordinator left the rank waiting for `ANSWER_TIMEOUT_S` seconds.
    """
    give_up: float | None = None
    while True:
        state, serial, step = status_table.proposal
        target = record.resumed_step if step == AT_START else step
        if state in {Proposal.NONE, Proposal.ABORT} or completed != target:
            # Published again, then read again: a new proposal may have come meanwhile.
            record.go_on(completed)
            if status_table.proposal == (state, serial, step):
                return Proposal.NONE
            continue
        if state is Proposal.SAVE:
            # From here on this rank counts as past the step, as the stop coordinator waits to see.
            record.go_on(completed)
            return Proposal.SAVE
        record.wait_at(completed, serial)
        if state is Proposal.GO:
            return Proposal.GO
        give_up = give_up or time.monotonic() + ANSWER_TIMEOUT_S
        if time.monotonic() > give_up:
            raise AgreementError(
                f"waited {ANSWER_TIMEOUT_S:.0f} s after step {completed} for an answer to stop "
                f"proposal {serial}; the node's agent may be gone"
            )
        time.sleep(POLL_S)
