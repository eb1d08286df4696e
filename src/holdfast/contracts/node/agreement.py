"""The stop agreement: either every rank leaves after the same step, or all ranks continue.

The stop coordinator of node 0 proposes a step S to every node. A node refuses if one of its ranks
is already past S. If all nodes accept, the answer is GO and each rank leaves after S. If one
refuses, the answer is ABORT, all ranks continue, and a later step is proposed. No rank keeps
waiting at S while another is inside the collectives of S+1: that rank makes its node refuse, and
the ABORT releases the waiting ranks.

This is a two-phase agreement with an abort, like the classic commit protocols. A rank's vote is a
word in shared memory, so normal steps cost nothing extra.

An additional save is agreed in the same way, with the answer SAVE instead of GO: all ranks save
after S and continue. With TEST they measure their nodes and links instead. Nothing else may be
proposed until every rank has entered a step after S. Otherwise a rank could miss the answer, and
the others would wait for it in the save's collective.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import rank_status

ROUNDS_MAX: Final = 24
MARGINS: Final = (0, 1, 1, 2, 2, 4)
ANSWER_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.0005

PortT = TypeVar("PortT")


class NodePort(Protocol):
    """The coordinator's interface to one node.

    The coordinator's own node answers at once, another node with a future.
    """

    def newest_entered(self) -> int | Future[int]:
        """Return the newest step that a rank of the node has entered, `NOWHERE` for none."""
        ...

    def propose(self, serial: int, step: int) -> bool | Future[bool]:
        """Propose `step` to the node's ranks. Return False if one of them is past it."""
        ...

    def answer(self, serial: int, state: rank_status.Proposal) -> object:
        """Send the answer `GO`, `SAVE`, `TEST` or `ABORT` to the node's ranks."""
        ...


class StatusPort:
    """The port of the coordinator's own node."""

    def __init__(self, status_table: rank_status.RankStatusTable) -> None:
        self._status_table = status_table

    def newest_entered(self) -> int:
        return self._status_table.newest_entered

    def propose(self, serial: int, step: int) -> bool:
        self._status_table.propose(serial, step)
        return self._status_table.accepts(serial, step)

    def answer(self, serial: int, state: rank_status.Proposal) -> None:
        self._status_table.answer(serial, state)


def ask_together(
    ports: Sequence[PortT], ask: Callable[[PortT], Any], *, wait_s: float | None = None
) -> list[Any]:
    """Ask all ports at once and return their answers, in the order of the ports.

    The first port, which may be the coordinator's own node, is asked last, because it answers
    within the call. Raises `ConnectionError` if a port is lost, and `AgreementError` if one has not
    answered within `wait_s` seconds. Every port has been asked by then.
    """
    asked = [begin(ask, port) for port in (*ports[1:], *ports[:1])]
    late = concurrent.futures.wait(asked, wait_s).not_done
    if late:
        raise AgreementError(
            f"{len(late)} of {len(ports)} nodes did not answer within {wait_s:.1f} s"
        )
    answers = [future.result() for future in asked]
    return answers[-1:] + answers[:-1]


def begin(ask: Callable[[PortT], Any], port: PortT) -> Future[Any]:
    """Ask one port. The future has the answer, also of a port that answers at once."""
    future: Future[Any] = Future()
    try:
        answer = ask(port)
    except ConnectionError as error:
        future.set_exception(error)
        return future
    if isinstance(answer, Future):
        return answer
    future.set_result(answer)
    return future


def agree_on_step(
    ports: Sequence[NodePort],
    *,
    first_serial: int = 1,
    word: rank_status.Proposal = rank_status.Proposal.GO,
    wait_s: float | None = None,
) -> tuple[int, int]:
    """Agree with all nodes on one step. Return (step, rounds); `AT_START` means before any step.

    `word` is the answer to ranks that wait at the step: `GO` to leave, `SAVE` to save and continue,
    `TEST` to measure and continue.
    Each question is open for `wait_s` seconds, or as long as the ports allow.

    Raises `AgreementError` if `ROUNDS_MAX` proposals were refused or a node did not answer in
    time, and `ConnectionError` if a node is lost. All reachable ranks have then been sent `ABORT`.
    """
    newest, ask_all = rank_status.NOWHERE, partial(ask_together, ports, wait_s=wait_s)
    for round_number in range(ROUNDS_MAX):
        serial = first_serial + round_number
        before, newest = newest, max(ask_all(lambda port: port.newest_entered()))
        step = (
            rank_status.AT_START
            if newest == rank_status.NOWHERE
            else newest + _margin(round_number, before, newest)
        )
        # Every node is asked even after a refusal, so that all status tables have the same serial.
        try:
            accepted = ask_all(partial(_propose, serial=serial, step=step))
        except (ConnectionError, AgreementError):
            with contextlib.suppress(ConnectionError, AgreementError):
                ask_all(partial(_answer, serial=serial, verdict=rank_status.Proposal.ABORT))
            raise
        verdict = word if all(accepted) else rank_status.Proposal.ABORT
        # A node that confirms too late has still received the answer.
        with contextlib.suppress(AgreementError):
            ask_all(partial(_answer, serial=serial, verdict=verdict))
        if verdict is word:
            return step, round_number + 1
    raise AgreementError(
        f"no common step in {ROUNDS_MAX} proposals, the last one for step {step}: a rank was "
        "always past the step. The newest step that every rank staged will be committed instead"
    )


def _margin(refused: int, before: int, newest: int) -> int:
    """Return how many steps after the newest one to propose, after `refused` refusals.

    The margin is small, because ranks train until then. It includes the steps that ranks ran during
    the refused round, from `before` to `newest`. Otherwise ranks with steps shorter than a network
    round trip would always be past the proposed step.
    """
    ran = newest - before if before > rank_status.NOWHERE else 0
    return MARGINS[min(refused, len(MARGINS) - 1)] + ran


def _propose(port: NodePort, serial: int, step: int) -> bool | Future[bool]:
    return port.propose(serial, step)


def _answer(port: NodePort, serial: int, verdict: rank_status.Proposal) -> object:
    return port.answer(serial, verdict)


def consider(
    status_table: rank_status.RankStatusTable, record: rank_status.RankRecord, completed: int
) -> rank_status.Proposal:
    """Return what a rank must do at the step boundary after `completed`.

    `GO` means leave, `SAVE` and `TEST` save or measure with all other ranks and continue, `NONE`
    continue. Called when `RankRecord.finish_step` found a proposal. Raises `AgreementError` if the
    stop coordinator did not answer within `ANSWER_TIMEOUT_S` seconds.
    """
    give_up: float | None = None
    while True:
        state, serial, step = status_table.proposal
        target = record.resumed_step if step == rank_status.AT_START else step
        if state in {rank_status.Proposal.NONE, rank_status.Proposal.ABORT} or completed != target:
            # Publish first, then read the proposal again: a new one may have arrived meanwhile.
            record.go_on(completed)
            if status_table.proposal == (state, serial, step):
                return rank_status.Proposal.NONE
            continue
        if state in {rank_status.Proposal.SAVE, rank_status.Proposal.TEST}:
            # From now on this rank counts as past the step, which the stop coordinator waits for.
            record.go_on(completed)
            return state
        record.wait_at(completed, serial)
        if state is rank_status.Proposal.GO:
            return rank_status.Proposal.GO
        give_up = give_up or time.monotonic() + ANSWER_TIMEOUT_S
        if time.monotonic() > give_up:
            raise AgreementError(
                f"no answer to stop proposal {serial} within {ANSWER_TIMEOUT_S:.0f} s after step "
                f"{completed}; check whether the node's agent still runs"
            )
        time.sleep(POLL_S)


def answer_from_status_table(
    status_table: rank_status.RankStatusTable, question: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a member's answer to a question of the stop agreement; None for other questions."""
    kind = question["kind"]
    if kind == "newest":
        return {
            "step": status_table.newest_entered,
            "oldest": status_table.oldest_entered,
            "signal": status_table.signals,
            "asked": status_table.asked,
        }
    if kind == "propose":
        status_table.propose(question["serial"], question["step"])
        return {"accepted": status_table.accepts(question["serial"], question["step"])}
    if kind == "answer":
        status_table.answer(question["serial"], rank_status.Proposal(question["state"]))
        return {}
    if kind == "announce":
        status_table.announce_stop(question.get("deadline"))
        return {"step": rank_status.NOWHERE}
    return None
