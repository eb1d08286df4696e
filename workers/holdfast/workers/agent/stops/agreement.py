"""Agree with the ranks of all nodes on the step of a stop or of an early save."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import clocks
from holdfast.contracts.node.agreement import ROUNDS_MAX, agree_on_step
from holdfast.contracts.node.rank_status import AT_START, NOWHERE, Proposal
from holdfast.workers.agent.node import LedNode, NodeReport
from holdfast.workers.agent.node_group import AGREE_WAIT_S, ANSWER_S_MIN, NodeGroup

# An early meeting of the ranks, agreed on like a stop, after which training continues.
#
# At the meeting the ranks save together, or test their nodes and links. A rank with a bad loss
# requests one too, and the ranks then agree on how to continue.


class EarlySave:
    """Agrees on one early save or paired test at a time. `note` journals a text.

    Each question to the nodes is open for `wait_s` seconds.
    """

    def __init__(self, note: Callable[[str], None], wait_s: float) -> None:
        self._note, self._wait_s = note, wait_s
        self._is_wanted = self._is_test_wanted = False
        self._answered = 0
        self._step: int | None = None

    def ask(self) -> None:
        """Request a save at the next step that all ranks can agree on."""
        self._is_wanted = True

    def ask_test(self) -> None:
        """Request a paired test at the next step that all ranks can agree on."""
        self._is_test_wanted = True

    def forget(self) -> None:
        """Forget requests and agreements, because a new launch starts."""
        self._is_wanted = self._is_test_wanted = False
        self._answered, self._step = 0, None

    def is_under_way(self, reports: Collection[NodeReport]) -> bool:
        """Return True while a rank may not have seen yet that it should save.

        No stop can be proposed meanwhile; see `contracts.agreement`.
        """
        if self._step is not None and all(report.entered > self._step for report in reports):
            self._step = None
        return self._step is not None

    def pursue(self, nodes: Sequence[LedNode], reports: Collection[NodeReport], serial: int) -> int:
        """Agree on the step of a requested save or test; return the first unused serial."""
        is_training = len(reports) == len(nodes) and all(r.entered > NOWHERE for r in reports)
        asked = max((report.asked for report in reports), default=0)
        is_save = self._is_wanted or asked > self._answered
        is_wanted = is_save or self._is_test_wanted
        if not is_wanted or not is_training or self.is_under_way(reports):
            return serial
        word, what = (Proposal.SAVE, "an early save") if is_save else (Proposal.TEST, "a test")
        if is_save:
            self._is_wanted = False
        else:
            self._is_test_wanted = False
        try:
            self._step, _ = agree_on_step(
                nodes, first_serial=serial, word=word, wait_s=self._wait_s
            )
        except AgreementError as error:
            self._note(f"no agreement on {what}: {error}")
        except ConnectionError:
            # The next poll will find the node lost, and training ends for that reason.
            return serial + ROUNDS_MAX
        else:
            if is_save:
                self._answered = max(asked, self._answered)
            why = f"a rank asked in step {asked}" if asked and is_save else what
            self._note(f"the ranks agreed to meet after step {self._step}: {why}")
        return serial + ROUNDS_MAX


AGREE_TRIES_MAX: Final = 20
AGREE_PAUSE_S: Final = 0.5


class StopAgreement:
    """The proposals of one launch at a time. Those of an early save use the same serials."""

    def __init__(
        self, group: NodeGroup, journal: JournalWriter, attempt: int, note: Callable[[str], None]
    ) -> None:
        self._group, self._journal, self._attempt = group, journal, attempt
        self.early_save = EarlySave(note, AGREE_WAIT_S)
        self.is_reached = False
        self._serial, self._tries, self._again_at = 1, 0, 0.0

    def begin(self) -> None:
        """Forget the proposals of the previous launch."""
        self.is_reached, self._serial, self._tries = False, 1, 0
        self.early_save.forget()

    def pursue_save(self) -> None:
        """Agree on the step of a requested early save, if there is one."""
        group = self._group
        reports = group.reports.values()
        self._serial = self.early_save.pursue(group.nodes, reports, self._serial)

    def pursue_stop(self, kill_at: float, *, counts: bool = True) -> None:
        """Bring all ranks to one step. Failed tries are repeated, up to a maximum.

        Nodes must answer in a part of what is left until `kill_at` (Unix seconds) for all tries.
        A try that does not count leaves as many for a stop request.
        """
        if self.is_reached or self._tries >= AGREE_TRIES_MAX or time.monotonic() < self._again_at:
            return
        group = self._group
        if self.early_save.is_under_way(group.reports.values()) or group.is_silent:
            return
        self._tries += counts
        wait_s = max(ANSWER_S_MIN, min(AGREE_WAIT_S, (kill_at - clocks.now()) / 4))
        try:
            self._agree(wait_s)
        except AgreementError as error:
            self._journal_failure(error)
            self._serial += ROUNDS_MAX
            self._again_at = time.monotonic() + AGREE_PAUSE_S
        except ConnectionError:
            # The next poll will find the node lost, and training ends for that reason.
            return

    def _agree(self, wait_s: float) -> None:
        """Agree on the step after which all ranks stop. Each question is open for `wait_s`."""
        began, nodes = time.monotonic(), self._group.nodes
        step, rounds = agree_on_step(nodes, first_serial=self._serial, wait_s=wait_s)
        self.is_reached = True
        self._journal.append(
            EventKind.STOP_AGREED,
            attempt=self._attempt,
            step=None if step == AT_START else step,
            rounds=rounds,
            waited_s=round(time.monotonic() - began, 6),
        )

    def _journal_failure(self, error: AgreementError) -> None:
        completed = [report.completed for report in self._group.reports.values()]
        self._journal.append(
            EventKind.STOP_FAILED,
            attempt=self._attempt,
            reason=str(error),
            newest_step=max(completed, default=NOWHERE),
        )
