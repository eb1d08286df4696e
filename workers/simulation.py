"""What a run would do on a trace of free GPUs: its end, its cost and its effective training time.

Each attempt is played from the costs of its parts. What follows an attempt is decided by `policy`,
the `auto` interval comes from `save_interval`, and the account from `goodput`, as for a real run.
Restarts in place, snapshots and pending timeouts are not played.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.attempt import RunRecord
from holdfast.contracts.errors import SpecError
from holdfast.contracts.goodput import Goodput, Launch, Span, account
from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import GROWER, Event, EventKind
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.prices import Prices
from holdfast.contracts.save_interval import PRIOR_NODE_S, Failures, choose_interval
from holdfast.contracts.spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.attempt_costs import Costs, Saves
from holdfast.workers.causes import STATE_OF_CAUSE
from holdfast.workers.growth import find_growth, grow_delay
from holdfast.workers.policy import decide, fits_any
from holdfast.workers.request import build_request
from holdfast.workers.traces import Trace

# A run that takes longer does not end.
END_S_MAX: Final = 10 * 366 * 24 * 3600.0
ATTEMPTS_MAX: Final = 20_000


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The outcome. Times are seconds from the submission. `reason` says why the run ended.

    `spans` are the attempts. `on_demand_alone` is the price of the same steps without preemptions.
    """

    is_complete: bool
    reason: str
    steps: int
    ends_s: float
    preemptions: int
    failures: int
    goodput: Goodput
    on_demand_alone: float | None
    spans: tuple[Span, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the values for `--json`, without the attempts."""
        names = ("is_complete", "reason", "steps", "ends_s", "preemptions", "failures")
        values = {name: getattr(self, name) for name in names}
        parts = {name: value for name, value in vars(self.goodput).items() if name != "steps_lost"}
        return {
            **values,
            "attempts": len(self.spans),
            "steps_lost": self.goodput.steps_lost,
            "on_demand_alone": self.on_demand_alone,
            **parts,
        }


@dataclass
class _Run:
    """A run that is being played."""

    spec: RunSpec
    steps: int
    costs: Costs
    trace: Trace
    chance: random.Random
    now: float = 0.0
    committed: int = 0
    trained_s: float = 0.0
    views: list[AttemptView] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._record = RunRecord(
            uid="0" * 32,
            run=self.spec.name,
            name=self.spec.name,
            root="/",
            created_at=0.0,
            spec=self.spec.model_dump(mode="json"),
            spec_digest=self.spec.digest,
        )

    @property
    def history(self) -> RunHistory:
        return RunHistory(
            paths=RunPaths(Path("/") / self.spec.name),
            record=self._record,
            spec=self.spec,
            attempts=tuple(self.views),
            events=tuple(self.events),
        )

    def play(self, gpus: int, reason: str) -> bool:
        """Play one attempt from its submission; return False if it never gets its GPUs."""
        submitted_at = self.now
        began = self.trace.first(submitted_at + self.costs.queue_s, gpus, has=True)
        if math.isinf(began):
            return False
        step_s = self.costs.step_s * self.spec.gpus / gpus
        loads_from = began + self.costs.start_s
        trained_from = loads_from + (self.costs.load_s if self.committed else 0.0)
        self._add_view(gpus, reason, submitted_at, began)
        saves = Saves(self._interval_s(gpus, step_s), self.costs, trained_from)
        stops_at, cause = self._stop(began, saves, gpus, step_s)
        resumed = self.committed
        trained_s = saves.trained_s(stops_at)
        last = min(self.steps, resumed + int(trained_s / step_s + 1e-9))
        ended_at, committed = self._end(cause, stops_at, step_s, last, resumed, saves)
        self.trained_s += trained_s
        self.committed = max(resumed, committed)
        has_trained = stops_at > trained_from
        launch = Launch(
            started_at=began,
            loads_from=loads_from if has_trained and resumed else None,
            trained_from=trained_from if has_trained else None,
            trained_until=stops_at,
            ended_at=ended_at,
            resumed_step=resumed,
            last_step=last if has_trained else None,
            held=tuple(saves.held(stops_at)),
        )
        self._end_view(cause, ended_at, launch)
        self.spans.append(
            Span(
                gpus=gpus,
                is_preempted=cause is Cause.PREEMPTION,
                submitted_at=submitted_at,
                started_at=began,
                stop_requested_at=stops_at,
                ended_at=ended_at,
                resumed_step=resumed,
                last_step=launch.last_step,
                launches=(launch,),
            )
        )
        self.now = ended_at
        return True

    def _stop(
        self, began: float, saves: Saves, gpus: int, step_s: float
    ) -> tuple[float, Cause | None]:
        """Return when training stops, and why; no cause if it is complete."""
        found: list[tuple[float, Cause | None]] = [
            (saves.reached((self.steps - self.committed) * step_s), None),
            (self.trace.first(began, gpus, has=False), Cause.PREEMPTION),
            (began + self._time_to_failure(gpus), Cause.NODE_FAILURE),
        ]
        if self.spec.resources.time_limit_min is not None:
            limit_s = 60.0 * self.spec.resources.time_limit_min
            found.append((began + max(0.0, limit_s - self.costs.flush_s), Cause.TIME_LIMIT))
        stop = min(found, key=lambda one: one[0])
        grows_at, size = self._growth(began, stop[0])
        if not size:
            return stop
        data = {"action": "relaunch", "by": GROWER, "gpus": size, "after_attempt": len(self.views)}
        self.events.append(
            Event(
                writer="flow",
                opening=1,
                sequence=len(self.events),
                time=grows_at,
                kind=EventKind.OPERATOR_REQUEST,
                data=data,
            )
        )
        return grows_at, Cause.OPERATOR

    def _growth(self, began: float, until: float) -> tuple[float, int]:
        """Return when the running attempt stops to continue with more GPUs, and with how many."""
        if not self.spec.elastic.grow:
            return until, 0
        history, now, seen = self.history, began, None
        delay_s = grow_delay(history)
        while now < until:
            seen, size = find_growth(
                history, partial(self._capacity, now), seen, now=now, fits=fits_any
            )
            if size:
                return now, size
            tick = (now // self.trace.gap_s + 1) * self.trace.gap_s
            due = math.inf if seen is None else max(seen.since, began) + delay_s
            now = due if now < due < tick else tick
        return until, 0

    def _capacity(self, at: float, *, is_urgent: bool) -> int:
        return self.trace.free(at)

    def _end(
        self,
        cause: Cause | None,
        stops_at: float,
        step_s: float,
        last: int,
        resumed: int,
        saves: Saves,
    ) -> tuple[float, int]:
        """Return when the attempt ends, and its newest committed step."""
        if cause is Cause.NODE_FAILURE:
            return stops_at, resumed + int(saves.durable_s(stops_at) / step_s)
        flushed_at = stops_at + self.costs.flush_s
        if cause is Cause.PREEMPTION and self.costs.flush_s > self.costs.notice_s:
            lost_at = stops_at + self.costs.notice_s
            return lost_at, resumed + int(saves.durable_s(lost_at) / step_s)
        return (flushed_at if last > resumed else stops_at), last

    def _interval_s(self, gpus: int, step_s: float) -> float:
        """Return the seconds of training between two saves."""
        given = self.spec.checkpoint
        if given.interval_steps is not None:
            return given.interval_steps * step_s
        if given.interval_s is not None:
            return given.interval_s
        seen = Failures(self._failures, self.trained_s)
        nodes = self.spec.share(gpus).nodes
        costs = self.costs
        return choose_interval(
            seen, nodes, cost_s=costs.blocked_s, flush_s=costs.flush_s
        ).interval_s

    @property
    def _failures(self) -> int:
        return sum(view.cause is Cause.NODE_FAILURE for view in self.views)

    def _time_to_failure(self, gpus: int) -> float:
        mean_s = self.costs.mean_failure_s
        if mean_s is None:
            mean_s = PRIOR_NODE_S / self.spec.share(gpus).nodes
        return self.chance.expovariate(1.0 / mean_s) if math.isfinite(mean_s) else math.inf

    def _add_view(self, gpus: int, reason: str, submitted_at: float, began: float) -> None:
        number = len(self.views) + 1
        request = build_request(self._record, self.spec, attempt=number, gpus=gpus, reason=reason)
        self.views.append(
            AttemptView(
                number=number,
                state=AttemptState.RUNNING,
                request=request,
                job_id=str(number),
                submitted_at=submitted_at,
                started_at=began,
            )
        )

    def _end_view(self, cause: Cause | None, ended_at: float, launch: Launch) -> None:
        self.views[-1] = replace(
            self.views[-1],
            state=AttemptState.COMPLETED if cause is None else STATE_OF_CAUSE[cause],
            cause=cause,
            facts={"committed_step": self.committed},
            last_step=launch.last_step,
            ended_at=ended_at,
        )


def simulate(spec: RunSpec, steps: int, costs: Costs, trace: Trace, *, seed: int = 0) -> Simulated:
    """Play a run of `steps` steps until it ends. The same `seed` gives the same failures.

    Raises `SpecError` if the trace never has enough GPUs for the run.
    """
    run = _Run(spec, steps, costs, trace, random.Random(seed))
    while True:
        decision = decide(run.history, trace.free(run.now), now=run.now)
        if decision.action != "relaunch":
            break
        run.now += decision.delay_s
        if run.now > END_S_MAX or len(run.views) >= ATTEMPTS_MAX:
            decision = replace(decision, reason=f"not complete after {len(run.views)} attempts")
            break
        if not run.play(decision.gpus, decision.reason):
            raise SpecError(
                f"the trace has {max(trace.gpus)} GPUs at most, and the run needs {decision.gpus}; "
                "give a smaller size, or lower elastic.min_gpus"
            )
    prices = Prices(**spec.cost.model_dump())
    last = run.views[-1].state is AttemptState.COMPLETED
    return Simulated(
        is_complete=last,
        reason=decision.reason,
        steps=run.committed,
        ends_s=run.now,
        preemptions=sum(span.is_preempted for span in run.spans),
        failures=sum(view.cause is Cause.NODE_FAILURE for view in run.views),
        goodput=account(
            run.spans, created_at=0.0, until=run.now, prices=prices, safe_step=run.committed
        ),
        on_demand_alone=_alone(spec, steps, costs, prices),
        spans=tuple(run.spans),
    )


def _alone(spec: RunSpec, steps: int, costs: Costs, prices: Prices) -> float | None:
    """Return the on-demand price of one attempt that trains all steps without a failure."""
    if prices.on_demand_per_gpu_hour is None:
        return None
    seconds = costs.start_s + steps * costs.step_s + costs.flush_s
    return spec.gpus * seconds / 3600.0 * prices.on_demand_per_gpu_hour
