"""Run histories for tests of pure functions, without files and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Outcome, RunRecord
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.causes import STATE_OF_CAUSE
from holdfast.workers.runs.request import build_request

NOW = 1_000_000.0


def spec_of(**fields: Any) -> RunSpec:
    base: dict[str, Any] = {"resources": {"gpus_per_node": 4}}
    return RunSpec(name="r", command=("t.py",), **{**base, **fields})


def record_of(spec: RunSpec) -> RunRecord:
    return RunRecord(
        uid="u" * 32,
        run="r",
        name="r",
        root="/srv",
        created_at=0,
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
    )


def attempt_of(
    spec: RunSpec,
    number: int,
    cause: Cause | None,
    *,
    committed: int | None = None,
    gpus: int | None = None,
    hosts: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    state: AttemptState | None = None,
    ended_at: float = NOW - 10,
    started_at: float | None = None,
    failed_host: str | None = None,
    evidence: tuple[str, ...] = (),
    steps: tuple[int, int] | None = None,
    traceback: str | None = None,
) -> AttemptView:
    count = gpus or spec.gpus
    request = build_request(record_of(spec), spec, attempt=number, gpus=count, reason="test")
    final = state or (STATE_OF_CAUSE[cause] if cause else AttemptState.COMPLETED)
    outcome = Outcome(
        state=final,
        cause=cause,
        job_id="1",
        world_size=count,
        committed_step=committed,
        failed_host=failed_host,
        traceback=traceback,
        started_at=0,
        ended_at=ended_at,
    )
    return AttemptView(
        number=number,
        state=final,
        request=request,
        job_id="1",
        cause=cause,
        hosts=hosts,
        outcome=outcome if final.is_terminal else None,
        facts={"lost_hosts": list(lost)} if lost else {},
        evidence=evidence,
        first_step=steps[0] if steps else None,
        last_step=steps[1] if steps else None,
        started_at=started_at,
        ended_at=ended_at,
    )


def history_of(
    spec: RunSpec, *attempts: AttemptView, asked: dict[str, Any] | None = None
) -> RunHistory:
    events: tuple[Event, ...] = ()
    if asked is not None:
        data = {"after_attempt": len(attempts), "by": "ann", **asked}
        events = (
            Event(
                writer="cli",
                opening=1,
                sequence=0,
                time=NOW,
                kind=EventKind.OPERATOR_REQUEST,
                data=data,
            ),
        )
    return RunHistory(
        paths=RunPaths(Path("/srv/r")),
        record=record_of(spec),
        spec=spec,
        attempts=attempts,
        events=events,
    )


def growing(spec: RunSpec, cause: Cause, count: int, **fields: Any) -> list[AttemptView]:
    """`count` attempts that each committed new steps and ended by `cause`."""
    return [attempt_of(spec, n, cause, committed=n * 10, **fields) for n in range(1, count + 1)]
