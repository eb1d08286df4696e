"""An early meeting of the ranks, agreed on like a stop, after which training continues.

At the meeting the ranks save together. A rank with a bad loss requests one too, and the ranks then
agree on how to continue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node.agreement import ROUNDS_MAX, agree_on_step
from holdfast.contracts.node.rank_status import NOWHERE, Proposal
from holdfast.workers.agent.node import Node, NodeReport


class EarlySave:
    """Agrees on one early save at a time. `note` journals a text.

    Each question to the nodes is open for `wait_s` seconds.
    """

    def __init__(self, note: Callable[[str], None], wait_s: float) -> None:
        self._note, self._wait_s = note, wait_s
        self._is_wanted = False
        self._answered = 0
        self._step: int | None = None

    def ask(self) -> None:
        """Request a save at the next step that all ranks can agree on."""
        self._is_wanted = True

    def forget(self) -> None:
        """Forget requests and agreements, because a new launch starts."""
        self._is_wanted, self._answered, self._step = False, 0, None

    def is_under_way(self, reports: Collection[NodeReport]) -> bool:
        """Return True while a rank may not have seen yet that it should save.

        No stop can be proposed meanwhile; see `contracts.agreement`.
        """
        if self._step is not None and all(report.entered > self._step for report in reports):
            self._step = None
        return self._step is not None

    def pursue(self, nodes: Sequence[Node], reports: Collection[NodeReport], serial: int) -> int:
        """Agree on the step of a requested save; return the first unused serial."""
        is_training = len(reports) == len(nodes) and all(r.entered > NOWHERE for r in reports)
        asked = max((report.asked for report in reports), default=0)
        is_wanted = self._is_wanted or asked > self._answered
        if not is_wanted or not is_training or self.is_under_way(reports):
            return serial
        self._is_wanted = False
        try:
            self._step, _ = agree_on_step(
                nodes, first_serial=serial, word=Proposal.SAVE, wait_s=self._wait_s
            )
        except AgreementError as error:
            self._note(f"no early save: {error}")
        except ConnectionError:
            # The next poll will find the node lost, and training ends for that reason.
            return serial + ROUNDS_MAX
        else:
            self._answered = max(asked, self._answered)
            why = f"a rank asked in step {asked}" if asked else "an early save"
            self._note(f"the ranks agreed to meet after step {self._step}: {why}")
        return serial + ROUNDS_MAX
