"""Effects of keys on decisions: of relaunches, growth, places, hangs, alarms and bad losses.

`DECISIONS` has for each key a function that compares a decision with the key and without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.support.histories import NOW, attempt_of, history_of, spec_of
from tests.support.runs import T0, RunFolder
from tests.unit.test_contracts_keep_rules import BRANCH
from tests.unit.test_contracts_keep_rules import NOW as BRANCH_NOW
from tests.unit.test_key_pairs import RULES
from tests.unit.test_numerics import BACK, LATER, NAN, names
from tests.unit.test_spec_effects import merged
from tests.unit.test_workers_places import ELSEWHERE, pending_at, spec_with

from holdfast.contracts.account.goodput import Held, costs_of, prices_of
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.keep_rules import kept_by_rules
from holdfast.contracts.spec.sections import Numerics
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor.limits import findings
from holdfast.trainer.numerics.detector import Detector, Known, answer
from holdfast.workers.agent.launch.warm_standby import free_port
from holdfast.workers.agent.leading import judge_completion
from holdfast.workers.agent.notices.watch import build_clouds
from holdfast.workers.agent.watch.silence import SilenceLimits
from holdfast.workers.checkpoints.own_checkpoints import OwnCheckpoint, why_incomplete
from holdfast.workers.decisions.causes import Ending
from holdfast.workers.decisions.growth import CapacityObservation, is_due, observe_capacity
from holdfast.workers.decisions.places import ReturnWatch, reason_to_move
from holdfast.workers.decisions.policy import decide, decide_in_place, fits_any
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.nodes.heartbeats import interval_s
from holdfast.workers.runs.tending import is_overdue


def sizes(**elastic: Any) -> tuple[int, ...]:
    return allowed_sizes(load_spec(merged(BASE, {"elastic": elastic})))


BASE: Final = {
    "name": "kelp",
    "command": ["train.py"],
    "resources": {"executor": "slurm", "nodes": 2, "gpus_per_node": 4},
}


def decision(
    cause: Cause, number: int, supervision: dict[str, Any] | None = None, **more: Any
) -> Any:
    spec = load_spec(merged(BASE, {"supervision": supervision or {}}, more))
    attempts = [attempt_of(spec, n, cause, committed=n * 10) for n in range(1, number + 1)]
    return decide(history_of(spec, *attempts), None, now=NOW)


def kept(key: str) -> bool:
    """Whether a keep rule keeps some checkpoints, and not all as without it."""
    keep = load_spec(merged(BASE, {"checkpoint": {"keep": {key: RULES[key]}}})).checkpoint.keep
    return 0 < len(kept_by_rules(BRANCH, keep, now=BRANCH_NOW)) < len(BRANCH)


def bad_step(**numerics: Any) -> int | None:
    """The step at which a loss is first bad: small ripples, 4 at step 30, and 9 at step 60."""
    table = {"supervision": {"numerics": {"on_spike": "warn", **numerics}}}
    detector = Detector(load_spec(merged(BASE, table)).supervision.numerics)
    losses = {30: 4.0, 60: 9.0}
    for step in range(1, 81):
        if detector.look(step, losses.get(step, 1.0 + 0.1 * (step % 3))):
            return step
    return None


def grown(**elastic: Any) -> bool:
    """Whether a run of two GPUs grows when four have been free for 200 s."""
    resources = {"executor": "slurm", "gpus_per_node": 4}
    spec = spec_of(elastic={"min_gpus": 1, **elastic}, resources=resources)
    running, began = AttemptState.RUNNING, NOW - 9999
    history = history_of(spec, attempt_of(spec, 1, None, gpus=2, state=running, started_at=began))
    since = CapacityObservation(gpus=4, since=NOW - 200)
    seen = observe_capacity(history, 4, since, now=NOW, fits=fits_any)
    return seen is not None and is_due(history, seen, now=NOW)


def returns(**resources: Any) -> bool:
    """Whether a run that is elsewhere goes back to its first choice, free for 20 minutes."""
    spec = spec_with(ELSEWHERE)
    spec = spec.model_copy(update={"resources": spec.resources.model_copy(update=resources)})
    watch = ReturnWatch(free_since=NOW - 1200, attempt=1)
    return bool(watch.look(history_of(spec, pending_at(spec, 1, 60)), lambda **_: 8, now=NOW))


def moves(*fallbacks: dict[str, Any]) -> bool:
    spec = spec_with(*fallbacks)
    return bool(reason_to_move(history_of(spec, pending_at(spec, 0, 6000)), now=NOW))


def overdue(**supervision: Any) -> bool:
    spec = load_spec(merged(BASE, {"supervision": supervision}))
    view = replace(attempt_of(spec, 1, None, state=AttemptState.PENDING), started_at=None)
    return is_overdue(spec, replace(view, submitted_at=NOW - 600), now=NOW)


def reply(base: Numerics, known: Known, **numerics: Any) -> tuple[str, int | None, tuple[Any, ...]]:
    """Action, step of the checkpoint and skipped steps of the answer to a NaN at step 100."""
    given = answer(NAN, base.model_copy(update=numerics), known)
    return given.action, given.to.step if given.to else None, tuple(w.steps for w in given.skip)


def passed(**alerts: float) -> list[str]:
    """The limits that a run has passed after three hours of two GPUs without a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name), "kelp", "5" * 32, {"alerts": alerts})
        folder.submit(1, 2, T0)
        folder.claim(1, T0)
        folder.launch(1, 1, 0, None)
        history = load_history(folder.paths)
        # Ages count from the time of the journal, which is the present.
        began = history.events[-1].time if "checkpoint_age_max_min" in alerts else T0
        found = findings(history, began + 3 * 3600)
    return [one.limit for one in found if one.passed]


def costs(**cost: Any) -> dict[str, Any]:
    return costs_of([Held(10.0, 1.0)], prices_of({"cost": cost}))


def state_of_an_early_end(allow_early_exit: bool) -> AttemptState:
    """How an attempt of 100 steps ended whose program left after step 40."""
    lines = [(EventKind.RESUMED, {}), (EventKind.NOTE, {"text": "", "promised": True})]
    events = [
        Event.model_validate(
            {
                "writer": "rank",
                "opening": 1,
                "sequence": number,
                "time": NOW,
                "kind": kind,
                "data": {**data, "launch": 1},
            }
        )
        for number, (kind, data) in enumerate(lines)
    ]
    return judge_completion(
        events, launch=1, step=40, steps_total=100, allow_early_exit=allow_early_exit
    ).state


def restarted(**supervision: Any) -> bool:
    """Whether training starts again in the same job after its second crash."""
    most = load_spec(merged(BASE, {"supervision": supervision})).supervision.restarts_in_place
    ending = Ending(state=AttemptState.FAILED, cause=Cause.INFRASTRUCTURE)
    return decide_in_place(ending, restarts=1, restarts_max=most).action == "restart"


def incomplete(**program: Any) -> str:
    """Why a checkpoint of one file that is unchanged for 40 s does not count; '' if it does."""
    stamp: Any = SimpleNamespace(path="model.bin")
    found = OwnCheckpoint(
        step=1, path=Path("/run/out/1"), folder=Path("/run/out/1"), files=(stamp,)
    )
    table = {"program": {"checkpoints": "out/{step}", **program}}
    return why_incomplete(found, load_spec(merged(BASE, table)).program, still_s=40, was_seen=True)


KNOWN: Final = Known(checkpoints=names(60, 85))
CHANGED: Final = Known(checkpoints=names(60), rolled_back=[7], skipped=[9], reached=101)
# Effects on decisions.
DECISIONS: Final[dict[str, Callable[[], bool]]] = {
    "elastic.min_gpus": lambda: sizes(min_gpus=4) == (4, 8) != sizes(),
    "elastic.max_gpus": lambda: sizes(max_gpus=12) == (8, 12) != sizes(),
    "elastic.choices": lambda: sizes(choices=[4, 8]) == (4, 8),
    "elastic.on_preemption": lambda: (
        decision(Cause.PREEMPTION, 1, elastic={"on_preemption": [4]}).gpus == 4
    ),
    "supervision.budgets": lambda: (
        [decision(Cause.HANG, 1, one).action for one in ({}, {"budgets": {"hang": 0}})]
        == ["relaunch", "stop"]
    ),
    "supervision.attempts_max": lambda: (
        [decision(Cause.PREEMPTION, 2, one).action for one in ({}, {"attempts_max": 2})]
        == ["relaunch", "stop"]
    ),
    "supervision.backoff_s": lambda: (
        decision(Cause.INFRASTRUCTURE, 1, {"backoff_s": 500}).delay_s
        > decision(Cause.INFRASTRUCTURE, 1).delay_s
    ),
    "supervision.ports": lambda: (
        free_port(
            load_spec(
                merged(BASE, {"supervision": {"ports": "23456-23499"}})
            ).supervision.port_range
        )
        in range(23456, 23500)
    ),
    "supervision.notices": lambda: (
        [[one.name for one in build_clouds(name, "", {})] for name in ("off", "gcp")]
        == [[], ["gcp"]]
    ),
    "supervision.numerics.spike_mads": lambda: (bad_step(), bad_step(spike_mads=60)) == (30, 60),
    "supervision.numerics.window": lambda: (bad_step(), bad_step(window=200)) == (30, 60),
    "elastic.grow": lambda: [grown(), grown(grow=True, grow_after_s=100)] == [False, True],
    "elastic.grow_after_s": lambda: (
        [grown(grow=True, grow_after_s=seconds) for seconds in (100, 300)] == [True, False]
    ),
    "resources.fallbacks": lambda: [moves(), moves(ELSEWHERE)] == [False, True],
    "resources.return_after_min": lambda: (
        [returns(return_after_min=minutes) for minutes in (10.0, 30.0)] == [True, False]
    ),
    "supervision.pending_timeout_min": lambda: (
        [overdue(), *(overdue(pending_timeout_min=minutes) for minutes in (9, 11))]
        == [False, True, False]
    ),
    "supervision.silence_s": lambda: (
        [
            SilenceLimits(
                load_spec(merged(BASE, {"supervision": one})).supervision.silence_s
            ).end_s("train", None)
            for one in ({}, {"silence_s": {"train": 77}})
        ]
        == [600, 77]
    ),
    "supervision.heartbeat_s": lambda: (
        [
            interval_s(load_spec(merged(BASE, {"supervision": one})).supervision.heartbeat_s, 2)
            for one in ({}, {"heartbeat_s": 9})
        ]
        == [2, 9]
    ),
    "supervision.restarts_in_place": lambda: (
        [restarted(restarts_in_place=most) for most in (1, 2)] == [False, True]
    ),
    "supervision.allow_early_exit": lambda: (
        [state_of_an_early_end(one) for one in (False, True)]
        == [AttemptState.FAILED, AttemptState.COMPLETED]
    ),
    "supervision.numerics.margin_steps": lambda: (
        [reply(BACK, KNOWN, margin_steps=steps)[1] for steps in (10, 30)] == [85, 60]
    ),
    "supervision.numerics.skip_steps": lambda: (
        [reply(LATER, KNOWN, skip_steps=steps)[2] for steps in (6, 9)] == [(6,), (9,)]
    ),
    "supervision.numerics.changes_max": lambda: (
        [reply(LATER, CHANGED, changes_max=most)[0] for most in (3, 2)] == ["skip", "stop"]
    ),
    "cost.gpu_hour": lambda: [costs()["cost"], costs(gpu_hour=3)["cost"]] == [None, 30],
    "cost.on_demand_per_gpu_hour": lambda: (
        [costs(gpu_hour=1)["saved"], costs(gpu_hour=1, on_demand_per_gpu_hour=4)["saved"]]
        == [None, 26]
    ),
    "cost.currency": lambda: (
        [costs(gpu_hour=1)["currency"], costs(gpu_hour=1, currency="EUR")["currency"]]
        == ["USD", "EUR"]
    ),
    "alerts.ettr_min": lambda: [passed(), passed(ettr_min=0.9)] == [[], ["ettr_min"]],
    "alerts.checkpoint_age_max_min": lambda: (
        [passed(checkpoint_age_max_min=minutes) for minutes in (60, 600)]
        == [["checkpoint_age_max_min"], []]
    ),
    "alerts.gpu_hours_max": lambda: (
        [passed(gpu_hours_max=hours) for hours in (5, 50)] == [["gpu_hours_max"], []]
    ),
    "program.settle_s": lambda: (
        [bool(incomplete(settle_s=seconds)) for seconds in (30, 50)] == [False, True]
    ),
    "program.complete": lambda: (
        [incomplete(), incomplete(complete=["done.json"])] == ["", "done.json is missing"]
    ),
    **{
        f"checkpoint.keep.{key}": (lambda key=key: kept(key))  # type: ignore[misc]
        for key in RULES
    },
}
