"""Drained nodes: which of them an attempt leaves, and how it learns of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import NOW, spec_of
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.documents import DrainedNodes, write_document
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.stops.sources import StopWatch
from holdfast.workers.decisions.drained_nodes import DrainPlan, may_leave, plan_departure
from holdfast.workers.decisions.policy import fits_any
from holdfast.workers.schedulers.slurm_capacity import REASON_MAX, drained_hosts

FOUR: dict[str, Any] = {"executor": "slurm", "nodes": 4, "gpus_per_node": 8}
HOSTS = ("n0", "n1", "n2", "n3")


def plan(
    *hosts: str, elastic: dict[str, Any] | None = None, spares: tuple[str, ...] = (), most: int = 3
) -> DrainPlan:
    return plan_departure(
        spec_of(resources=FOUR, elastic=elastic or {}),
        drained=dict.fromkeys(hosts, "bad DIMM"),
        training=HOSTS,
        spares=spares,
        restarts_max=most,
        fits=fits_any,
    )


@pytest.mark.parametrize(
    ("hosts", "given", "expected"),
    [
        # Spare nodes come before a smaller size.
        (["n2"], {"spares": ("n4",)}, ("spare", 4, ("n2",))),
        (["n2"], {"elastic": {"choices": [8, 16, 32]}}, ("shrink", 2, ("n2",))),
        (["n1", "n2", "n3"], {"elastic": {"min_gpus": 8}}, ("shrink", 1, ("n1", "n2", "n3"))),
        # Neither is there: the drain waits for the end of the job.
        (["n2"], {}, ("", 0, ())),
        (["n2"], {"elastic": {"min_gpus": 32, "max_gpus": 32}}, ("", 0, ())),
        (["n2"], {"spares": ("n4",), "most": 0}, ("", 0, ())),
        # As many as there are spare nodes for.
        (["n1", "n3"], {"spares": ("n4",)}, ("spare", 4, ("n1",))),
        # The node that leads stays.
        (["n0"], {"spares": ("n4",)}, ("", 0, ())),
        (["n0", "n1"], {"spares": ("n4",)}, ("spare", 4, ("n1",))),
        # A drained spare node replaces none.
        (["n2", "n4"], {"spares": ("n4",)}, ("", 0, ())),
        (["n9"], {"spares": ("n4",)}, ("", 0, ())),
    ],
)
def test_drained_nodes_are_left_if_others_can_continue(
    hosts: list[str], given: dict[str, Any], expected: tuple[str, int, tuple[str, ...]]
) -> None:
    found = plan(*hosts, **given)
    assert (found.way, found.nodes, found.leave) == expected
    assert found.released == (("n4",) if "n4" in hosts else ())


def test_a_plan_names_the_reasons_of_the_operator() -> None:
    found = plan("n2", spares=("n4",))
    assert found.why == "n2 (bad DIMM)"
    assert found.reason == "drained nodes: n2 (bad DIMM); 1 spare node replace them"
    assert plan("n2").reason == "drained nodes: n2 (bad DIMM); no size of elastic fits 3 nodes"
    assert plan("n0").reason == "drained nodes: n0 (bad DIMM); n0 leads the attempt"
    assert plan("n4", spares=("n4",)).reason == "drained nodes: n4 (bad DIMM)"


@pytest.mark.parametrize(
    ("resources", "elastic", "request_", "expected"),
    [
        ({"spare_nodes": 1}, {}, {}, True),
        ({}, {"min_gpus": 8}, {}, True),
        ({}, {}, {}, False),
        ({"spare_nodes": 1}, {}, {"executor": "local"}, False),
        ({"spare_nodes": 1}, {}, {"nodes": 1}, False),
        ({"spare_nodes": 1}, {}, {"restarts": 0}, False),
    ],
)
def test_the_scheduler_is_asked_only_for_attempts_that_may_leave_nodes(
    tmp_path: Path,
    resources: dict[str, Any],
    elastic: dict[str, Any],
    request_: dict[str, Any],
    expected: bool,
) -> None:
    spec = spec_of(resources={**FOUR, **resources}, elastic=elastic)
    given = load_context(RunFolder(tmp_path, "quick", "1" * 32).submit(1, 3, 0.0).request).request
    supervision = given.supervision.model_copy(
        update={"restarts_in_place": request_.pop("restarts", 3)}
    )
    facts = {"executor": "slurm", "nodes": 4, "spare_nodes": resources.get("spare_nodes", 0)}
    request = given.model_copy(update={**facts, "supervision": supervision, **request_})
    assert may_leave(spec, request) is expected


def test_nodes_of_the_job_that_slurm_shows_as_drained() -> None:
    nodes = [
        {"NodeName": "n0", "State": "ALLOCATED"},
        {"NodeName": "n1", "State": "MIXED+DRAIN", "Reason": "bad DIMM [root@2026-11-28T01:00:00]"},
        {"NodeName": "n2", "State": "DOWN*+DRAIN", "Reason": "gone"},
        {"NodeName": "n3", "State": "DRAINING"},
        {"NodeName": "n4", "State": "IDLE+DRAIN", "Reason": "of another job"},
        {"NodeName": "n5", "State": "ALLOCATED*+DRAIN", "Reason": "silent"},
        {"NodeName": "n6", "State": "ALLOCATED+DRAIN", "Reason": "\x1b[2J" + "x" * 999},
    ]
    found = drained_hosts(nodes, ("n0", "n1", "n2", "n3", "n5", "n6"))
    assert list(found) == ["n1", "n3", "n6"]
    assert (found["n1"], found["n3"]) == ("bad DIMM", "")
    assert found["n6"].startswith("\\x1b[2Jxxx")
    assert len(found["n6"]) == REASON_MAX


def test_an_agent_reads_which_nodes_are_drained(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 3, 0.0)
    context = load_context(attempt.request)
    request = context.request.model_copy(update={"nodes": 2})
    watch = StopWatch(context.__class__(**{**vars(context), "nodes": 2, "request": request}), float)
    assert watch.from_file(0.0) is None
    assert watch.drained == {}
    write_document(attempt.drained, DrainedNodes(hosts={"n1": "bad DIMM"}))
    assert watch.from_file(100.0) is None
    assert watch.drained == {"n1": "bad DIMM"}
    attempt.drained.write_text("{")
    assert watch.from_file(200.0) is None
    assert watch.drained == {"n1": "bad DIMM"}


def test_the_alert_of_a_departure_has_the_reason() -> None:
    lines: list[tuple[EventKind, dict[str, Any]]] = [
        (EventKind.LAUNCH_ENDED, {"launch": 1, "ending": "drained", "last_step": 7}),
        (
            EventKind.LAUNCH_STARTED,
            {
                "launch": 2,
                "way": "spare",
                "nodes": 2,
                "lost": [],
                "joined": ["n2"],
                "drained": ["n1"],
                "reason": "n1 (bad DIMM)",
            },
        ),
    ]
    events = [
        Event(
            writer="node-0000",
            opening=1,
            sequence=number,
            time=NOW,
            kind=kind,
            data={"attempt": 1, **data},
        )
        for number, (kind, data) in enumerate(lines)
    ]
    (alert,) = noticed(events)
    assert alert["text"] == (
        "launch 1 left drained nodes at step 7: n1 (bad DIMM); it continued with n2"
    )
