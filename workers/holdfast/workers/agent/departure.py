"""Leave the nodes that their operator drains, at a step boundary, and continue without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.node import clocks
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.losses import plan_without_drained
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.stops.agreement import StopAgreement
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.decisions.drained_nodes import DrainPlan

# A drain is not urgent, so a failed agreement may wait for a long first step.
AGAIN_S: Final = 30.0


class Departure:
    """The plan of a launch to leave drained nodes. All ranks first stop after the same step.

    `note` journals a text.
    """

    def __init__(
        self,
        context: AgentContext,
        group: NodeGroup,
        agreement: StopAgreement,
        listener: StopListener,
        note: Callable[[str], None],
    ) -> None:
        self.plan: DrainPlan | None = None
        self._context, self._group, self._agreement = context, group, agreement
        self._listener, self._note = listener, note
        self._known: object = None
        self._said = ""
        self._again_at = 0.0
        self._reached_at: float | None = None

    def begin(self) -> None:
        """Forget the plan, because a new launch starts."""
        self.plan, self._known, self._reached_at, self._again_at = None, None, None, 0.0

    def look(self) -> None:
        """Decide again when other nodes are drained than before, once all ranks train."""
        group, drained = self._group, self._listener.drained
        training = [node.name for node in group.nodes]
        spares = [spare.name for spare in group.spares]
        known = (dict(drained), training, spares)
        if known == self._known or not self._all_train():
            return
        self._known = known
        self.plan = None
        if drained.keys().isdisjoint((*training, *spares)):
            return
        plan = plan_without_drained(
            self._context, drained=drained, training=training, spares=spares
        )
        group.release(plan.released)
        what = plan.way or ("release" if plan.released else "stay")
        if plan.reason != self._said:
            self._said = plan.reason
            self._note(f"{what} after a drain: {plan.reason}")
        if plan.way:
            self.plan = plan

    def pursue(self) -> None:
        """Agree with all ranks on the step after which they stop. A failed try is not urgent."""
        now = time.monotonic()
        if self._agreement.is_reached or now < self._again_at:
            return
        limit_s = self._context.request.supervision.flush_timeout_s
        self._agreement.pursue_stop(clocks.now() + limit_s, counts=False)
        if self._agreement.is_reached:
            self._reached_at = now
        elif not self._agreement.early_save.is_under_way(self._group.reports.values()):
            self._again_at = now + AGAIN_S

    @property
    def is_overdue(self) -> bool:
        """True if ranks still run although they agreed to stop long ago."""
        limit_s = self._context.request.supervision.flush_timeout_s
        return self._reached_at is not None and time.monotonic() - self._reached_at > limit_s

    def _all_train(self) -> bool:
        reports = self._group.reports.values()
        return self._group.is_whole and all(report.entered > NOWHERE for report in reports)
