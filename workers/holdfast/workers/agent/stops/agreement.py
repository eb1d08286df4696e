"""Agree with the ranks of all nodes on the step of a stop or of an early save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import steady
from holdfast.contracts.node.agreement import ROUNDS_MAX, agree_on_step
from holdfast.contracts.node.rank_status import AT_START, NOWHERE
from holdfast.workers.agent.node_group import AGREE_WAIT_S, ANSWER_S_MIN, NodeGroup
from holdfast.workers.agent.stops.early_save import EarlySave

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

    def pursue_stop(self, kill_at: float) -> None:
        """Bring all ranks to one step. Failed tries are repeated, up to a maximum.

        Nodes must answer in a part of what is left until `kill_at` (Unix seconds) for all tries.
        """
        if self.is_reached or self._tries >= AGREE_TRIES_MAX or time.monotonic() < self._again_at:
            return
        group = self._group
        if self.early_save.is_under_way(group.reports.values()) or group.is_silent:
            return
        self._tries += 1
        wait_s = max(ANSWER_S_MIN, min(AGREE_WAIT_S, (kill_at - steady.now()) / 4))
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
