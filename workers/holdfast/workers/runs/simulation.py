"""What a run would do on a trace of free GPUs: its end, its cost and its effective training time.

Each attempt is played from the costs of its parts. What follows an attempt is decided by `policy`,
the `auto` interval comes from `save_interval`, and the account from `goodput`, as for a real run.
Restarts in place, snapshots, pending timeouts and Slurm's forecasts are not played.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.account.goodput import Goodput, Prices, Stretch, account, stretches_of
from holdfast.contracts.account.save_interval import PRIOR_NODE_S, Failures, choose_interval
from holdfast.contracts.disk.journal import GROWER, Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SpecError
from holdfast.contracts.plain_text import counted, exact
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.records.tally import LaunchSpan, Span
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions import causes, growth, places, policy
from holdfast.workers.decisions.attempt_costs import Costs, Saves
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.cluster_history import Trace

# A run that takes longer does not end.
END_S_MAX: Final = 10 * 366 * 24 * 3600.0
ATTEMPTS_MAX: Final = 20_000
SAVES_MAX: Final = 200_000
LOOKS_MAX: Final = 1_000_000
# More than any run has.
GPUS_ALWAYS: Final = 2**31


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The outcome. Times are seconds from the submission. `reason` says why the run ended.

    `spans` are the attempts, and `stretches` those in a row at one place. `on_demand_alone` is the
    price of the same steps without preemptions.
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
    stretches: tuple[Stretch, ...]

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
            "stretches": [one.as_json() for one in self.stretches],
            **parts,
        }


@dataclass
class _Run:
    """A run that is being played."""

    spec: RunSpec
    steps: int
    costs: Costs
    traces: tuple[Trace, ...]
    chance: random.Random
    now: float = 0.0
    committed: int = 0
    trained_s: float = 0.0
    saves: float = 0.0
    looks: int = 0
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

    def play(self, gpus: int, place: int, reason: str) -> bool:
        """Play one attempt from its submission; return False if it never gets its GPUs."""
        submitted_at = self.now
        began = self.traces[place].first(submitted_at + self.costs.queue_s, gpus, has=True)
        moves_at = self._moves_at(place)
        if began > moves_at:
            self._play_wait(gpus, place, reason, moves_at)
            return True
        if math.isinf(began):
            return False
        step_s = self.costs.step_s * self.spec.gpus / gpus
        loads_from = began + self.costs.start_s
        trained_from = loads_from + (self.costs.load_s if self.committed else 0.0)
        self._add_view(gpus, place, reason, AttemptState.RUNNING, began)
        saves = Saves(self._interval_s(gpus, step_s), self.costs, trained_from)
        stops_at, cause = self._stop(began, saves, gpus, step_s)
        self.saves += saves.count(stops_at)
        if self.saves > SAVES_MAX:
            raise SpecError(
                f"the run has {self.saves:.3g} checkpoints or more, expected at most {SAVES_MAX}; "
                "give a longer --interval, or fewer --steps"
            )
        resumed = self.committed
        trained_s = saves.trained_s(stops_at)
        last = min(self.steps, resumed + int(trained_s / step_s + 1e-9))
        ended_at, committed = self._end(cause, stops_at, step_s, last, resumed, saves)
        self.trained_s += trained_s
        self.committed = max(resumed, committed)
        has_trained = stops_at > trained_from
        launch = LaunchSpan(
            started_at=began,
            loads_from=loads_from if has_trained and resumed else None,
            trained_from=trained_from if has_trained else None,
            trained_until=stops_at,
            ended_at=ended_at,
            resumed_step=resumed,
            last_step=last if has_trained else None,
            held=tuple(saves.held(stops_at)),
        )
        self._end_attempt(cause, ended_at, place, (launch,))
        return True

    def _moves_at(self, place: int) -> float:
        """Return when a job that was submitted now and waits goes to the next place."""
        resources = self.spec.resources
        following = resources.next_place(place)
        # The attempt that would wait is not in the history yet.
        if following is None or len(self.views) + 1 >= self.spec.supervision.attempts_max:
            return math.inf
        return self.now + 60 * resources.fallbacks[following - 1].after_min

    def _play_wait(self, gpus: int, place: int, reason: str, until: float) -> None:
        """Play an attempt that waits for too long and is taken back for the next place."""
        self._add_view(gpus, place, reason, AttemptState.PENDING, None)
        following = self.spec.resources.next_place(place) or 0
        self._ask_for_place(following, places.reason_to_move(self.history, now=until), until)
        self._end_attempt(Cause.OPERATOR, until, place, ())

    def _ask_for_place(self, place: int, why: str, at: float) -> None:
        self._request(places.relaunch_request(self.views[-1], place, why), at)

    def _request(self, facts: dict[str, Any], at: float) -> None:
        self.events.append(
            Event(
                writer="flow",
                opening=1,
                sequence=len(self.events),
                time=at,
                kind=EventKind.OPERATOR_REQUEST,
                data=facts,
            )
        )

    def _stop(
        self, began: float, saves: Saves, gpus: int, step_s: float
    ) -> tuple[float, Cause | None]:
        """Return when training stops, and why; no cause if it is complete."""
        found: list[tuple[float, Cause | None]] = [
            (saves.reached((self.steps - self.committed) * step_s), None),
            (self._trace.first(began, gpus, has=False), Cause.PREEMPTION),
            (began + self._time_to_failure(gpus), Cause.NODE_FAILURE),
        ]
        if self.spec.resources.time_limit_min is not None:
            limit_s = 60.0 * self.spec.resources.time_limit_min
            found.append((began + max(0.0, limit_s - self.costs.flush_s), Cause.TIME_LIMIT))
        stop = min(found, key=lambda one: one[0])
        grows_at, size = self._growth(began, stop[0])
        returns_at, why = self._return(began, min(grows_at, stop[0]))
        if why:
            self._ask_for_place(0, why, returns_at)
            return returns_at, Cause.OPERATOR
        if not size:
            return stop
        after = len(self.views)
        facts = {"action": "relaunch", "by": GROWER, "gpus": size, "after_attempt": after}
        self._request(facts, grows_at)
        return grows_at, Cause.OPERATOR

    def _return(self, began: float, until: float) -> tuple[float, str]:
        """Return when the running attempt returns to the first choice, and why; '' if not."""
        if places.place_of(self.views[-1]) == 0:
            return until, ""
        history, now, watch = self.history, began, places.ReturnWatch()
        delay_s = 60 * self.spec.resources.return_after_min
        while now < until:
            if why := watch.look(history, partial(self._capacity, now), now=now):
                return now, why
            due = math.inf if watch.free_since is None else max(watch.free_since, began) + delay_s
            now = self._next_look(now, due)
        return until, ""

    def _next_look(self, now: float, due: float) -> float:
        """Return the next time at which the free GPUs of the first choice may differ."""
        self.looks += 1
        if self.looks > LOOKS_MAX:
            raise SpecError(
                f"the run is looked at {self.looks} times, once per entry of the trace, expected "
                f"at most {LOOKS_MAX}; give a trace with a longer gap, or fewer --steps"
            )
        gap_s = self.traces[0].gap_s
        tick = (now // gap_s + 1) * gap_s
        return due if now < due < tick else tick

    def _growth(self, began: float, until: float) -> tuple[float, int]:
        """Return when the running attempt stops to continue with more GPUs, and with how many."""
        if not self.spec.elastic.grow:
            return until, 0
        history, now, seen = self.history, began, None
        delay_s = growth.grow_delay(history)
        while now < until:
            ask = partial(self._capacity, now, place=places.place_of(self.views[-1]))
            seen, size = growth.find_growth(history, ask, seen, now=now, fits=policy.fits_any)
            if size:
                return now, size
            due = math.inf if seen is None else max(seen.since, began) + delay_s
            now = self._next_look(now, due)
        return until, 0

    def room_at(self, place: int) -> int | None:
        """Return the GPUs free now at a place; None for the local executor, which has no queue."""
        on_slurm = self.spec.resources.executor == "slurm"
        return self.traces[place].free(self.now) if on_slurm else None

    def _capacity(self, at: float, *, is_urgent: bool, place: int = 0) -> int:
        return self.traces[place].free(at)

    @property
    def _trace(self) -> Trace:
        """The free GPUs at the place of the newest attempt."""
        return self.traces[places.place_of(self.views[-1])]

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

    def _add_view(
        self, gpus: int, place: int, reason: str, state: AttemptState, began: float | None
    ) -> None:
        """Add an attempt that was submitted now."""
        number = len(self.views) + 1
        request = build_request(
            self._record, self.spec, attempt=number, gpus=gpus, reason=reason, place=place
        )
        self.views.append(
            AttemptView(
                number=number,
                state=state,
                request=request,
                job_id=str(number),
                submitted_at=self.now,
                started_at=began,
            )
        )

    def _end_attempt(
        self, cause: Cause | None, ended_at: float, place: int, launches: tuple[LaunchSpan, ...]
    ) -> None:
        view = self.views[-1]
        launch = launches[-1] if launches else LaunchSpan()
        self.views[-1] = replace(
            view,
            state=AttemptState.COMPLETED if cause is None else causes.STATE_OF_CAUSE[cause],
            cause=cause,
            facts={"committed_step": self.committed},
            last_step=launch.last_step,
            ended_at=ended_at,
        )
        self.spans.append(
            Span(
                gpus=view.gpus,
                place=place,
                gpu_hour=self.spec.resources.gpu_hour_at(place),
                is_preempted=cause is Cause.PREEMPTION,
                submitted_at=view.submitted_at,
                started_at=view.started_at,
                stop_requested_at=launch.trained_until,
                ended_at=ended_at,
                resumed_step=launch.resumed_step,
                last_step=launch.last_step,
                launches=launches,
            )
        )
        self.now = ended_at


def simulate(
    spec: RunSpec,
    steps: int,
    costs: Costs,
    trace: Trace,
    *,
    fallbacks: Sequence[Trace | None] = (),
    seed: int = 0,
) -> Simulated:
    """Play a run of `steps` steps until it ends. The same `seed` gives the same failures.

    `fallbacks` are the traces of the spec's fallbacks in order. One without a trace always has
    enough GPUs. Raises `SpecError` if no place of the run ever has enough GPUs for it.
    """
    if steps * costs.step_s > END_S_MAX:
        raise SpecError(
            f"{steps} steps of {exact(costs.step_s)} s take {steps * costs.step_s:.3g} s, expected "
            f"at most {END_S_MAX:.3g} s; give fewer --steps, or a smaller --cost step_s"
        )
    places = [*fallbacks, *[None] * len(spec.resources.fallbacks)][: len(spec.resources.fallbacks)]
    always = Trace((GPUS_ALWAYS,), trace.gap_s)
    traces = (trace, *(one or always for one in places))
    run = _Run(spec, steps, costs, traces, random.Random(seed))
    while True:
        # The supervisor's own decision, so a simulation cannot differ from what a run would do.
        decision = policy.decide(run.history, run.room_at, now=run.now)
        if decision.action != "relaunch":
            break
        run.now += decision.delay_s + costs.relaunch_s
        if run.now > END_S_MAX or len(run.views) >= ATTEMPTS_MAX:
            decision = replace(
                decision, reason=f"not complete after {counted(len(run.views), 'attempt')}"
            )
            break
        if not run.play(decision.gpus, decision.place, decision.reason):
            raise SpecError(
                f"the trace has {counted(max(traces[decision.place].gpus), 'GPU')} at most, "
                f"and the run needs "
                f"{decision.gpus}; give a smaller size, or lower elastic.min_gpus"
            )
    return _outcome(run, decision.reason)


def _outcome(run: _Run, reason: str) -> Simulated:
    prices = Prices(**run.spec.cost.model_dump())
    until: Any = {"created_at": 0.0, "until": run.now, "prices": prices, "safe_step": run.committed}
    return Simulated(
        is_complete=run.views[-1].state is AttemptState.COMPLETED,
        reason=reason,
        steps=run.committed,
        ends_s=run.now,
        preemptions=sum(span.is_preempted for span in run.spans),
        failures=sum(view.cause is Cause.NODE_FAILURE for view in run.views),
        goodput=account(run.spans, **until),
        on_demand_alone=_alone(run.spec, run.steps, run.costs, prices),
        spans=tuple(run.spans),
        stretches=tuple(stretches_of(run.spans, run.spec.resources, **until)),
    )


def _alone(spec: RunSpec, steps: int, costs: Costs, prices: Prices) -> float | None:
    """Return the on-demand price of one attempt that trains all steps without a failure."""
    if prices.on_demand_per_gpu_hour is None:
        return None
    seconds = costs.start_s + steps * costs.step_s + costs.flush_s
    return spec.gpus * seconds / 3600.0 * prices.on_demand_per_gpu_hour
