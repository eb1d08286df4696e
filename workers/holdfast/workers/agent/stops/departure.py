"""Leave nodes that are drained or slow, at a step boundary, and continue without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node import clocks
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.losses import plan_without_drained
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.stops.agreement import StopAgreement
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.agent.watch.slowdowns import SlowNode
from holdfast.workers.decisions.drained_nodes import DrainPlan, LeavePrice, gain_of, restart_price_s

# A drain is not urgent, so a failed agreement may wait for a long first step.
AGAIN_S: Final = 30.0
LOOK_EVERY_S: Final = 5.0
# A change of nodes that did not help must not be followed by many others.
LEFT_MAX: Final = 3


class KnowsSlow(Protocol):
    """Names slow nodes, each with the time at which it was named."""

    @property
    def slow(self) -> Mapping[str, tuple[SlowNode, float]]: ...


class SlowNodes:
    """Chooses the slow nodes of an attempt that it pays to leave. `note` journals a text.

    The paired test has proved them slow. The change of nodes is another proof: if the node that
    takes the place is slow too, the work there is heavier. Then no node of that place is left
    again, and none is excluded for it.
    """

    def __init__(
        self, context: AgentContext, watch: KnowsSlow, note: Callable[[str], None]
    ) -> None:
        self._context, self._watch, self._note = context, watch, note
        self._is_on = context.request.health.slowdown == "act"
        self._price_s: float | None = None
        self._chosen: dict[str, str] = {}
        # By place in the launch: the slow host whose place another one took.
        self._replaced: dict[int, str] = {}
        self._said: set[str] = set()
        self._look_at = 0.0
        # All hosts that were left, which later attempts exclude.
        self.hosts: tuple[str, ...] = ()

    def begin(self) -> None:
        """Forget what was chosen for the last launch, because a new one starts."""
        self._chosen, self._price_s, self._look_at = {}, None, 0.0

    def to_leave(
        self, training: Sequence[str], spares: Sequence[str], remaining_s: float | None
    ) -> Mapping[str, str]:
        """Return the hosts to leave, with the reasons. `remaining_s` is as in `LeavePrice`."""
        now = time.monotonic()
        if not self._is_on or not self._watch.slow or now < self._look_at:
            return self._chosen
        self._look_at = now + LOOK_EVERY_S
        for host, (slow, since) in self._watch.slow.items():
            if host in self._chosen or host not in training:
                continue
            if reason := self._why_not(host, slow, training):
                self._say(f"stays on {host}, which is slow: {reason}")
            elif self._pays(host, slow, now - since, training, spares, remaining_s):
                lost = f"slow: the others wait {slow.cost:.0%} of each step"
                self._chosen = {**self._chosen, host: lost}
        return self._chosen

    def have_left(
        self, hosts: Sequence[str], training: Sequence[str], *, are_replaced: bool
    ) -> list[str]:
        """Take note of the hosts that were left; return those of them that were slow."""
        slow = [host for host in hosts if host in self._chosen]
        self.hosts = (*self.hosts, *slow)
        # On fewer nodes, all of them have other work than before.
        places = {training.index(host): host for host in slow} if are_replaced else {}
        self._replaced = {**self._replaced, **places} if are_replaced else {}
        return slow

    def _why_not(self, host: str, slow: SlowNode, training: Sequence[str]) -> str:
        if host == training[0]:
            return "it leads the attempt"
        if (before := self._replaced.get(slow.node)) is not None:
            self.hosts = tuple(one for one in self.hosts if one != before)
            return "the node before it in its place was slow too, so the work there is heavier"
        if len(self.hosts) >= LEFT_MAX:
            return f"{len(self.hosts)} slow nodes were left already"
        return ""

    def _pays(
        self,
        host: str,
        slow: SlowNode,
        lasted_s: float,
        training: Sequence[str],
        spares: Sequence[str],
        remaining_s: float | None,
    ) -> bool:
        plan = plan_without_drained(
            self._context, drained={host: ""}, training=training, spares=spares, what="slow"
        )
        if not plan.way:
            self._say(f"stays with {plan.reason}")
            return False
        if self._price_s is None:
            self._price_s = self._ask_price()
        if self._price_s is None:
            return False
        gain = gain_of(slow.cost, len(training), plan.nodes)
        price = LeavePrice(restart_s=self._price_s, gain=gain)
        if not price.pays(lasted_s, remaining_s):
            return False
        self._say(
            f"leaves {host}: a step is {gain:.0%} shorter on {plan.nodes} nodes without it, the "
            f"slowdown has lasted {lasted_s:.0f} s, and leaving costs {self._price_s:.0f} s"
        )
        return True

    def _ask_price(self) -> float | None:
        try:
            return restart_price_s(load_tallied(self._context.run).events)
        except (HoldfastError, OSError):
            # The next look asks again.
            return None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)


class Departure:
    """The plan of a launch to leave nodes. All ranks first stop after the same step.

    `note` journals a text.
    """

    def __init__(
        self,
        context: AgentContext,
        group: NodeGroup,
        agreement: StopAgreement,
        listener: StopListener,
        note: Callable[[str], None],
        slow: SlowNodes,
    ) -> None:
        self.plan: DrainPlan | None = None
        self._context, self._group, self._agreement = context, group, agreement
        self._listener, self._note, self._slow = listener, note, slow
        self._known: object = None
        self._said = ""
        self._again_at = 0.0
        self._reached_at: float | None = None

    def begin(self) -> None:
        """Forget the plan, because a new launch starts."""
        self.plan, self._known, self._reached_at, self._again_at = None, None, None, 0.0
        self._slow.begin()

    def look(self, remaining_s: float | None = None) -> None:
        """Decide again when other nodes are to be left than before, once all ranks train.

        `remaining_s` is how long training would take on the present nodes; None if unknown.
        """
        group = self._group
        training = [node.name for node in group.nodes]
        spares = [spare.name for spare in group.spares]
        slow = self._slow.to_leave(training, spares, remaining_s)
        drained = {**slow, **self._listener.drained}
        known = (dict(drained), training, spares)
        if known == self._known or not self._all_train():
            return
        self._known = known
        self.plan = None
        if drained.keys().isdisjoint((*training, *spares)):
            return
        what = "slow" if drained.keys() <= slow.keys() else "drained"
        plan = plan_without_drained(
            self._context, drained=drained, training=training, spares=spares, what=what
        )
        group.release(plan.released)
        act = plan.way or ("release" if plan.released else "stay")
        if plan.reason != self._said:
            self._said = plan.reason
            after = "a slowdown" if what == "slow" else "a drain"
            self._note(f"{act} after {after}: {plan.reason}")
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
