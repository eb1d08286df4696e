"""A meeting out of turn: agreed like a stop, after which training goes on.

Ranks save together there. One whose loss is bad asks for it too, and they then agree on what is to
come of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from holdfast.contracts.agreement import ROUNDS_MAX, AskAll, agree_on_step, ask_in_turn
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.rank_status import NOWHERE, Proposal
from holdfast.workers.agent.runtime import Node, NodeReport


class EarlySave:
    """At most one at a time. `note` takes what people should know."""

    def __init__(self, note: Callable[[str], None], ask_all: AskAll = ask_in_turn) -> None:
        self._note, self._ask_all = note, ask_all
        self._is_wanted = False
        self._answered = 0
        self._step: int | None = None

    def ask(self) -> None:
        """Want a save at the next step that all ranks can agree on."""
        self._is_wanted = True

    def forget(self) -> None:
        """A new launch begins: nothing is agreed, and its state is what was committed."""
        self._is_wanted, self._answered, self._step = False, 0, None

    def is_under_way(self, reports: Collection[NodeReport]) -> bool:
        """True while a rank may not have seen yet that it should save.

        No stop can be proposed then: see `contracts.agreement`.
        """
        if self._step is not None and all(report.entered > self._step for report in reports):
            self._step = None
        return self._step is not None

    def pursue(self, nodes: Sequence[Node], reports: Collection[NodeReport], serial: int) -> int:
        """Agree on the step where a save is wanted; returns the first serial not used yet."""
        is_training = len(reports) == len(nodes) and all(r.entered > NOWHERE for r in reports)
        asked = max((report.asked for report in reports), default=0)
        is_wanted = self._is_wanted or asked > self._answered
        if not is_wanted or not is_training or self.is_under_way(reports):
            return serial
        self._is_wanted = False
        try:
            self._step, _ = agree_on_step(
                nodes, first_serial=serial, word=Proposal.SAVE, ask_all=self._ask_all
            )
        except AgreementError as error:
            self._note(f"no early save: {error}")
        except ConnectionError:
            # The node is found lost at the next look, and training ends for that reason.
            return serial + ROUNDS_MAX
        else:
            self._answered = max(asked, self._answered)
            why = f"the loss of step {asked}" if asked else "a save out of turn"
            self._note(f"a meeting was agreed on after step {self._step}: {why}")
        return serial + ROUNDS_MAX
