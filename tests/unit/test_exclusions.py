"""Excluded hosts: which they are, when one is used again, and what the next attempt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.cli.show import newest_reason
from holdfast.contracts.disk.journal import FALLBACKS, GROWER, PENDING_TIMEOUT
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.exclusions import (
    EXCLUDE_S,
    NOTICE_MARGIN_S,
    Certainty,
    excluded_hosts,
    exclusions,
)
from holdfast.workers.decisions.places import ReturnWatch
from holdfast.workers.decisions.policy import Decision, decide
from holdfast.workers.schedulers.base import BECAUSE_EXCLUDED
from holdfast.workers.schedulers.slurm_capacity import Room

NODES = ("n1", "n2", "n3", "n4")
ON_SLURM = {"executor": "slurm", "nodes": 4, "gpus_per_node": 4, "partition": "spot"}
NOTICE_S = 300.0


def rigid(nodes: int = 4, **resources: Any) -> RunSpec:
    return spec_of(resources={**ON_SLURM, "nodes": nodes, **resources})


def elastic(nodes: int = 4, **fields: Any) -> RunSpec:
    return spec_of(resources={**ON_SLURM, "nodes": nodes}, elastic={"min_gpus": 4, **fields})


def room(busy: Sequence[str] = (), down: Sequence[str] = (), nodes: Sequence[str] = NODES) -> Room:
    """Nodes with four GPUs each, of which some are busy with other jobs, and some are down."""
    return Room(
        resources=rigid().resources,
        free={host: 0 if host in {*busy, *down} else 4 for host in nodes},
        up={host: 4 for host in nodes if host not in down},
        has=dict.fromkeys(nodes, 4),
        notice_s=NOTICE_S,
    )


def failed(spec: RunSpec, number: int, host: str, how: Certainty, **fields: Any) -> AttemptView:
    """An attempt that ended because `host` failed, `how` says in which way."""
    cause = Cause.NODE_FAILURE if how >= Certainty.UNHEALTHY else Cause.INFRASTRUCTURE
    cause = Cause.HANG if how is Certainty.HUNG else cause
    named = how in {Certainty.SUSPECT, Certainty.HUNG, Certainty.HARDWARE}
    given: dict[str, Any] = {
        "committed": 10 * number,
        "failed_host": host if named else None,
        "evidence": ("uncorrectable ECC error",) if how is Certainty.HARDWARE else (),
        "lost": (host,) if how is Certainty.LOST else (),
        "hosts": NODES,
        **fields,
    }
    view = attempt_of(spec, number, cause, **given)
    if how is Certainty.UNHEALTHY:
        return replace(view, facts={"unhealthy_hosts": [host], "lost_hosts": []})
    return view


def lost(spec: RunSpec, host: str = "n3", **fields: Any) -> RunHistory:
    return history_of(spec, failed(spec, 1, host, Certainty.LOST, **fields))


def decided(history: RunHistory, found: Room | int | None, **fields: Any) -> Decision:
    return decide(history, lambda _: found, now=NOW, **fields)


# --- a lost node ---------------------------------------------------------------------------------


def test_a_rigid_run_on_all_nodes_waits_in_the_queue_for_the_lost_node() -> None:
    decision = decided(lost(rigid()), room(down=["n3"]))
    assert (decision.action, decision.gpus, decision.exclude) == ("relaunch", 16, ())
    assert "n3 (lost) allowed again, because the other nodes cannot hold it" in decision.reason
    assert "waits for nodes that are down" in decision.reason


def test_a_rigid_run_with_enough_nodes_leaves_the_lost_node_out() -> None:
    decision = decided(lost(rigid(3)), room())
    assert (decision.gpus, decision.exclude) == (12, ("n3",))
    assert "without n3 (lost)" in decision.reason


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        (room(), 12),
        (room(busy=["n1"]), 8),
        (room(busy=["n1", "n2", "n4"]), 4),
        (room(down=["n1", "n3"]), 8),
    ],
)
def test_an_elastic_run_chooses_a_size_without_the_lost_node(found: Room, gpus: int) -> None:
    decision = decided(lost(elastic()), found)
    assert (decision.action, decision.gpus, decision.exclude) == ("relaunch", gpus, ("n3",))


def test_a_lost_node_is_used_again_only_when_slurm_has_noticed_the_loss() -> None:
    early = decided(lost(rigid()), room())
    assert early.action == "wait"
    assert "waits until Slurm reports n3 (lost) as down" in early.reason
    assert decided(lost(rigid()), room(down=["n3"])).action == "relaunch"
    # A node that Slurm still uses after its limit was not lost for Slurm.
    old = lost(rigid(), ended_at=NOW - NOTICE_S - NOTICE_MARGIN_S)
    assert decided(old, room()).action == "relaunch"
    # The other nodes suffice, so nothing is waited for.
    assert decided(lost(rigid(3)), room()).action == "relaunch"


@pytest.mark.parametrize(
    ("spec", "found"), [(rigid(), room(down=["n3"])), (rigid(3), room()), (elastic(), room())]
)
@pytest.mark.parametrize("by", ["alice", GROWER, FALLBACKS, PENDING_TIMEOUT])
def test_every_request_for_an_attempt_excludes_what_every_other_attempt_excludes(
    by: str, spec: RunSpec, found: Room
) -> None:
    views = [failed(spec, 1, "n3", Certainty.LOST), attempt_of(spec, 2, Cause.OPERATOR)]
    asked = {"action": "relaunch", "by": by, "gpus": spec.gpus, "place": 0}
    decision = decided(history_of(spec, *views, asked=asked), found)
    is_whole = by == "alice" and spec.elastic.min_gpus
    expected = () if spec == rigid() or is_whole else ("n3",)
    if is_whole:
        # Alice asked for 16 GPUs on four nodes, and Slurm has not noticed the loss yet.
        assert decision.action == "wait"
        return
    assert (decision.action, decision.exclude) == ("relaunch", expected)
    assert decision.gpus == (12 if spec == elastic() else spec.gpus)


def test_a_resumed_elastic_run_chooses_a_size_without_the_lost_node() -> None:
    spec = elastic()
    views = [failed(spec, 1, "n3", Certainty.LOST), attempt_of(spec, 2, Cause.OPERATOR)]
    decision = decided(history_of(spec, *views, asked={"action": "resume"}), room())
    assert (decision.action, decision.gpus, decision.exclude) == ("relaunch", 12, ("n3",))


def test_a_grown_run_does_not_use_the_faulty_idle_node() -> None:
    spec = elastic(grow=True)
    views = [
        failed(spec, 1, "n3", Certainty.UNHEALTHY),
        attempt_of(spec, 2, Cause.OPERATOR, gpus=8),
    ]
    asked = {"action": "relaunch", "by": GROWER, "gpus": 16}
    decision = decided(history_of(spec, *views, asked=asked), room())
    assert (decision.gpus, decision.exclude) == (12, ("n3",))


# --- which exclusion is dropped ------------------------------------------------------------------


def all_kinds(spec: RunSpec) -> list[AttemptView]:
    """Six attempts that excluded five hosts, s the suspect one."""
    ways = [
        ("s", Certainty.SUSPECT), ("s", Certainty.SUSPECT), ("h", Certainty.HUNG),
        ("h", Certainty.HUNG), ("e", Certainty.HARDWARE), ("u", Certainty.UNHEALTHY),
        ("l", Certainty.LOST),
    ]  # fmt: skip
    return [
        failed(spec, n, host, how, ended_at=NOW - 1000 + n) for n, (host, how) in enumerate(ways, 1)
    ]


def test_hosts_are_ordered_by_how_certain_their_fault_is() -> None:
    found = exclusions(all_kinds(rigid()), NOW)
    assert [one.host for one in found] == ["l", "u", "e", "h", "s"]
    assert [one.certainty for one in found] == sorted(Certainty, reverse=True)


@pytest.mark.parametrize(("nodes", "kept"), [(5, "lueh"), (6, "lue"), (7, "lu"), (8, "l"), (9, "")])
def test_the_least_certain_exclusion_is_dropped_first(nodes: int, kept: str) -> None:
    spec = rigid(nodes)
    hosts = ("1", "2", "3", "4", *"luehs")
    decision = decided(history_of(spec, *all_kinds(spec)), room(nodes=hosts, down=["l"]))
    assert decision.action == "relaunch"
    assert decision.exclude == tuple(kept)


def test_the_older_of_two_exclusions_is_dropped_first() -> None:
    spec = rigid(3)
    views = [
        failed(spec, number, host, Certainty.UNHEALTHY, ended_at=NOW - 100 + number)
        for number, host in ((1, "n2"), (2, "n4"))
    ]
    assert decided(history_of(spec, *views), room()).exclude == ("n4",)


def test_a_suspect_host_is_used_while_another_node_is_down() -> None:
    spec = rigid(3)
    hangs = [failed(spec, n, "n3", Certainty.HUNG) for n in (1, 2)]
    assert decided(history_of(spec, *hangs), room()).exclude == ("n3",)
    decision = decided(history_of(spec, *hangs), room(down=["n1"]))
    assert (decision.action, decision.exclude) == ("relaunch", ())
    # A faulty one is not: the run waits for n1.
    bad = history_of(spec, failed(spec, 1, "n3", Certainty.UNHEALTHY))
    decision = decided(bad, room(down=["n1"]))
    assert (decision.action, decision.exclude) == ("relaunch", ("n3",))
    assert "waits for nodes that are down" in decision.reason


def test_a_host_that_the_place_does_not_have_is_not_excluded() -> None:
    # sbatch refuses a name that it does not know.
    assert decided(lost(rigid(), "retired-7"), room()).exclude == ()


def test_a_host_that_the_spec_names_is_not_excluded() -> None:
    spec = rigid(1, extra={"nodelist": "n3"})
    found = replace(room(down=["n3"]), required=frozenset({"n3"}))
    assert decided(lost(spec), found).exclude == ()


def test_a_known_bad_node_that_must_be_used_does_not_trip_the_breaker() -> None:
    spec = rigid()
    views = [failed(spec, n, "n3", Certainty.UNHEALTHY, committed=10) for n in range(1, 8)]
    decision = decided(history_of(spec, *views), room())
    assert (decision.action, decision.exclude) == ("relaunch", ())
    other = [failed(spec, n, f"n{n}", Certainty.UNHEALTHY, committed=10) for n in range(1, 5)]
    assert "3 attempts in a row" in decided(history_of(spec, *other), room()).reason


# --- refusals ------------------------------------------------------------------------------------


def refused(spec: RunSpec, number: int, exclude: Sequence[str]) -> AttemptView:
    view = attempt_of(spec, number, Cause.INFRASTRUCTURE)
    assert view.request is not None
    text = f"Slurm refused r, {BECAUSE_EXCLUDED} {', '.join(exclude)}: not available"
    return replace(
        view,
        request=view.request.model_copy(update={"exclude": tuple(exclude)}),
        job_id=None,
        outcome=None,
        evidence=(text,),
    )


def test_a_refused_exclusion_is_dropped_and_ends_no_run() -> None:
    spec = rigid(3, fallbacks=[{"partition": "prod"}])
    spec = spec.model_copy(
        update={"supervision": spec.supervision.model_copy(update={"attempts_max": 6})}
    )
    views = [failed(spec, n, f"n{n}", Certainty.UNHEALTHY) for n in (1, 2, 3, 4)]
    tried = [4, 2, 1]
    for count in tried:
        number = len(views) + 1
        views.append(refused(spec, number, excluded_hosts(views, NOW)[:count]))
        # Slurm does not tell which nodes there are.
        decision = decided(history_of(spec, *views), None)
        assert decision.action == "relaunch", decision.reason
        assert len(decision.exclude) == count // 2
        assert (decision.gpus, decision.delay_s) == (12, 0.0)
        assert "allowed again, because Slurm refused the job without" in decision.reason
    assert len(views) > spec.supervision.attempts_max


def test_refused_exclusions_count_for_no_budget_and_not_for_the_breaker() -> None:
    spec = rigid()
    views = [failed(spec, 1, "n3", Certainty.LOST)]
    views += [refused(spec, n, ["n3"]) for n in range(2, 9)]
    views.append(attempt_of(spec, 9, Cause.INFRASTRUCTURE))
    decision = decided(history_of(spec, *views), room(down=["n3"]))
    assert decision.action == "relaunch", decision.reason


# --- places --------------------------------------------------------------------------------------


def test_sizes_come_from_the_place_where_the_attempt_goes() -> None:
    spec = spec_of(
        resources={**ON_SLURM, "fallbacks": [{"partition": "prod"}]}, elastic={"min_gpus": 4}
    )
    view = failed(spec, 1, "p1", Certainty.LOST)
    assert view.request is not None
    away = replace(view, request=view.request.model_copy(update={"place": 1}))
    elsewhere = room(nodes=("p1", "p2", "p3", "p4"))
    rooms = {0: room(busy=NODES), 1: elsewhere}
    decision = decide(history_of(spec, away), rooms.__getitem__, now=NOW)
    assert (decision.place, decision.gpus, decision.exclude) == (1, 12, ("p1",))
    # A number is about the first choice and says nothing about another place.
    assert decide(history_of(spec, away), 0, now=NOW).gpus == 16


def test_a_request_for_a_smaller_place_takes_a_size_that_exists_there() -> None:
    spec = spec_of(
        resources={**ON_SLURM, "fallbacks": [{"partition": "prod"}]}, elastic={"min_gpus": 4}
    )
    asked = {"action": "relaunch", "by": FALLBACKS, "gpus": 16, "place": 1}
    history = history_of(spec, attempt_of(spec, 1, Cause.OPERATOR), asked=asked)
    decision = decided(history, room(nodes=("p1", "p2")))
    assert (decision.place, decision.gpus) == (1, 8)


@pytest.mark.parametrize("state", [AttemptState.RUNNING, AttemptState.PENDING])
def test_a_run_elsewhere_returns_when_the_first_choice_is_free(state: AttemptState) -> None:
    spec = rigid(fallbacks=[{"partition": "prod"}], return_after_min=10)
    view = attempt_of(spec, 1, None, state=state)
    assert view.request is not None
    is_running = state is AttemptState.RUNNING
    away = replace(
        view,
        request=view.request.model_copy(update={"place": 1}),
        submitted_at=NOW,
        # The clock of the node is an hour ahead.
        started_at=NOW + 3600 if is_running else None,
        ended_at=None,
    )
    watch, history = ReturnWatch(), history_of(spec, away)
    seen = [
        watch.look(history, lambda *, is_urgent: 16, now=NOW + after_s) for after_s in (0, 599, 600)
    ]
    assert seen[:2] == ["", ""]
    assert "the first choice has 16 free GPUs" in seen[2]


def test_the_watch_for_the_first_choice_begins_again_with_each_attempt() -> None:
    spec = rigid(fallbacks=[{"partition": "prod"}], return_after_min=10)
    watch = ReturnWatch()
    for number, now in ((1, NOW), (2, NOW + 700)):
        view = attempt_of(spec, number, None, state=AttemptState.RUNNING)
        assert view.request is not None
        away = replace(view, request=view.request.model_copy(update={"place": 1}))
        assert watch.look(history_of(spec, away), lambda *, is_urgent: 16, now=now) == ""


# --- clocks --------------------------------------------------------------------------------------


def at(view: AttemptView, created_at: float) -> AttemptView:
    assert view.request is not None
    return replace(view, request=view.request.model_copy(update={"created_at": created_at}))


@pytest.mark.parametrize("ended_at", [NOW - 5 * EXCLUDE_S, NOW - 60, NOW + 3600, NOW + 1e9])
def test_the_clock_of_a_node_does_not_prolong_or_end_an_exclusion(ended_at: float) -> None:
    spec = rigid()
    first = at(failed(spec, 1, "n3", Certainty.LOST, ended_at=ended_at), NOW - 100)
    second = at(attempt_of(spec, 2, Cause.PREEMPTION), NOW - 50)
    assert excluded_hosts([first, second], NOW) == ("n3",)
    assert excluded_hosts([first, second], NOW + EXCLUDE_S) == ()
    alone = replace(first, facts={**first.facts, "noticed_at": NOW - 50})
    assert excluded_hosts([alone], NOW) == ("n3",)
    assert excluded_hosts([alone], NOW + EXCLUDE_S) == ()


# --- what is asked -------------------------------------------------------------------------------


def test_a_run_of_one_size_needs_no_answer_of_the_scheduler() -> None:
    def silence(place: int) -> Room:
        raise AssertionError(f"asked about place {place}")

    spec = rigid()
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION, committed=5))
    assert decide(history, silence, now=NOW).gpus == 16
    asked = {"action": "cancel"}
    ended = history_of(elastic(), attempt_of(elastic(), 1, Cause.PREEMPTION), asked=asked)
    assert decide(ended, silence, now=NOW).action == "stop"


def test_show_prints_which_hosts_the_newest_attempt_does_not_use() -> None:
    why = decided(lost(rigid(3)), room()).reason
    run = {"state": "running", "reason": None, "attempts": [{"reason": "first"}, {"reason": why}]}
    assert newest_reason(run) == why
    assert "without n3 (lost)" in why
    assert newest_reason({**run, "state": "completed"}) is None
    assert newest_reason({**run, "reason": why}) is None, "it is printed once"
