"""The stop coordinator if there is no agent: a thread of each node's local rank 0.

The thread of node 0 checks for signals that any rank caught, for the run's stop file and for bad
losses. It brings all ranks to one step by agreement. The other nodes answer over the channel.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import agreement
from holdfast.contracts.node.channel import ChannelHost, ChannelMember, DismissedError, Peer
from holdfast.contracts.node.rank_status import NOWHERE, Proposal
from holdfast.trainer.ranks.rank_context import RankContext

POLL_S: Final = 0.05
LOOK_S: Final = 0.5
# A node that is silent for longer joins again. Until then its signals are not seen.
LOOK_TIMEOUT_S: Final = 2.0
TRIES_MAX: Final = 5
RETRY_S: Final = 1.0
JOIN_S: Final = 5.0


class StopCoordinator:
    """Runs from construction until `close`, or until the ranks have agreed to stop."""

    def __init__(self, context: RankContext, note: Callable[..., None]) -> None:
        """Start the thread. `note(kind, **data)` writes journal events, on node 0 only."""
        self._context = context
        self._note = note
        self._is_closing = threading.Event()
        self._host: ChannelHost | None = None
        self._serial = 1
        self._asked, self._answered = 0, 0
        self._meets_after: int | None = None
        nodes = context.identity.nodes
        if context.identity.node == 0 and nodes > 1:
            self._host = ChannelHost(context.attempt.channel, nodes)
        work = self._lead if context.identity.node == 0 else self._serve_as_member
        self._thread = threading.Thread(target=work, name="holdfast-stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Wait at most `JOIN_S` seconds."""
        self._is_closing.set()
        self._thread.join(JOIN_S)
        if self._host is not None:
            self._host.close()

    def _lead(self) -> None:
        looked_at, source = 0.0, ""
        while not self._is_closing.wait(POLL_S):
            source = source or self._signal_name(self._context.status_table.signals)
            self._asked = max(self._asked, self._context.status_table.asked)
            if not source and time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                source = self._look_further()
            if self._is_meeting():
                continue
            if source:
                self._stop(source)
                return
            if self._asked > self._answered:
                self._meet()

    def _look_further(self) -> str:
        if self._context.run.stop_file.exists():
            return "stop file"
        caught = 0
        for asked in [_look_at(peer) for peer in self._peers()]:
            # torchrun detects a lost node. The node's silence is not a stop request.
            with contextlib.suppress(ConnectionError):
                answer = asked.result()
                caught = max(caught, answer["signal"])
                self._asked = max(self._asked, answer["asked"])
        return self._signal_name(caught)

    def _peers(self) -> list[Peer]:
        return list(self._host.peers.values()) if self._host else []

    def _is_meeting(self) -> bool:
        """Return True while a rank may not yet have seen that it should meet the others.

        No step can be proposed meanwhile: see `contracts.agreement`.
        """
        if self._meets_after is not None and self._oldest() > self._meets_after:
            self._meets_after = None
        return self._meets_after is not None

    def _oldest(self) -> int:
        """Return the oldest current step of any rank, or `NOWHERE` if a node does not answer."""
        try:
            others = [
                int(each["oldest"]) for each in agreement.ask_together(self._peers(), _look_at)
            ]
        except ConnectionError:
            return NOWHERE
        return min([self._context.status_table.oldest_entered, *others])

    def _meet(self) -> None:
        """Bring all ranks together because of a bad loss. On failure, the next poll retries."""
        asked, first = self._asked, self._serial
        self._serial += agreement.ROUNDS_MAX
        try:
            step, _ = agreement.agree_on_step(self._ports(), first_serial=first, word=Proposal.SAVE)
        except (AgreementError, ConnectionError):
            return
        self._answered, self._meets_after = asked, step

    def _stop(self, source: str) -> None:
        self._note(EventKind.SIGNAL, source=source, name=source, detail="seen without an agent")
        self._context.status_table.announce_stop(None)
        began = time.monotonic()
        for number in range(TRIES_MAX):
            first = self._serial + number * agreement.ROUNDS_MAX
            try:
                step, rounds = agreement.agree_on_step(
                    self._ports(is_stop=True), first_serial=first
                )
            except (AgreementError, ConnectionError) as error:
                self._note(EventKind.STOP_FAILED, reason=str(error), newest_step=self._newest())
                if self._is_closing.wait(RETRY_S):
                    return
                continue
            waited_s = round(time.monotonic() - began, 4)
            self._note(EventKind.STOP_AGREED, step=step, rounds=rounds, waited_s=waited_s)
            return

    def _ports(self, *, is_stop: bool = False) -> list[agreement.NodePort]:
        ports: list[agreement.NodePort] = [agreement.StatusPort(self._context.status_table)]
        if self._host is not None:
            self._host.wait_for_peers()
            if is_stop:
                agreement.ask_together(self._peers(), _announce)
        return [*ports, *self._peers()]

    def _newest(self) -> int:
        return max(record.completed for record in self._context.status_table.records())

    def _serve_as_member(self) -> None:
        hello: dict[str, Any] = {"node": self._context.identity.node}
        while not self._is_closing.is_set():
            try:
                member = ChannelMember(self._context.attempt.channel, hello)
            except AgreementError:
                # Node 0 never listened: it has ended, or the run ended before this node connected.
                return
            with contextlib.closing(member):
                try:
                    self._answer(member)
                except DismissedError:
                    # This thread was delayed while the ranks kept training, so join again.
                    continue
                except ConnectionError:
                    return

    def _answer(self, member: ChannelMember) -> None:
        while not self._is_closing.is_set():
            question = member.receive(POLL_S)
            if question is not None:
                member.reply(
                    **(
                        agreement.answer_from_status_table(self._context.status_table, question)
                        or {}
                    )
                )

    @staticmethod
    def _signal_name(number: int) -> str:
        return signal.Signals(number).name if number else ""


def _look_at(peer: Peer) -> Future[dict[str, int]]:
    """Ask a node for its oldest step, the last signal, and the step that a rank asked about."""
    return peer.ask("newest", _numbers, timeout_s=LOOK_TIMEOUT_S)


def _numbers(answer: dict[str, Any]) -> dict[str, int]:
    return {key: int(answer[key]) for key in ("oldest", "signal", "asked")}


def _announce(peer: Peer) -> Future[object]:
    return peer.ask("announce", lambda _: None, deadline=None)
