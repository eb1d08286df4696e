"""Export of a run as OpenLineage events, for catalogues that collect lineage from many systems.

Each attempt is an OpenLineage run of the job named after the Holdfast run. It has a START event
and a COMPLETE, FAIL or ABORT event. The checkpoint that it resumed from is its input, and the
checkpoints that it committed are its outputs: datasets in the namespace `file`, with the
manifest's checksum as version. All attempts have the Holdfast run as parent.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from openlineage.client import event_v2, facet_v2
from openlineage.client.serde import Serde

from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.states import AttemptState
from holdfast.contracts.version import holdfast_version
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import pages, reports, run_queries, views

NAMESPACE: Final = "holdfast"
PRODUCER: Final = f"holdfast/{holdfast_version()}"
FILES: Final = "file"
_JOB_TYPE: Final = facet_v2.job_type_job.JobTypeJobFacet(
    processingType="BATCH", integration="HOLDFAST", jobType="TRAINING"
)
_ENDINGS: Final[Mapping[str, event_v2.RunState]] = {
    AttemptState.COMPLETED: event_v2.RunState.COMPLETE,
    AttemptState.PREEMPTED: event_v2.RunState.ABORT,
    AttemptState.TIMED_OUT: event_v2.RunState.ABORT,
    AttemptState.CANCELLED: event_v2.RunState.ABORT,
    AttemptState.FAILED: event_v2.RunState.FAIL,
    AttemptState.HUNG: event_v2.RunState.FAIL,
    AttemptState.NODE_FAILED: event_v2.RunState.FAIL,
    AttemptState.LOST: event_v2.RunState.FAIL,
}


def export_run(database: Database, run: str) -> list[dict[str, Any]]:
    """Return the OpenLineage events of `run`, as `find_run` resolves it.

    Raises `NotFoundError` for an unknown run.
    """
    shown = run_queries.show_run(database, run)
    uid = shown["uid"]
    found = pages.list_checkpoints(database, uid, newest_first=False, limit=None).items
    origins: list[reports.Ancestor] = []
    if shown["forked_from"]:
        # A parent checkpoint that is not in the index is referred to by its id.
        with contextlib.suppress(NotFoundError):
            origins = run_queries.ancestry(database, shown["forked_from"])[:1]
    return openlineage_events(shown, found, origins)


def openlineage_events(
    run: views.RunView,
    checkpoints: Sequence[views.CheckpointView],
    origins: Sequence[reports.Ancestor] = (),
) -> list[dict[str, Any]]:
    """Return the events of a run's attempts, sorted by time, as plain data.

    `checkpoints` are the run's own. `origins` are the checkpoints of other runs that it was
    forked from.
    """
    known = {one["id"]: (one["path"], one["checksum"]) for one in (*checkpoints, *origins)}
    written: defaultdict[int, list[views.CheckpointView]] = defaultdict(list)
    for one in checkpoints:
        written[one["attempt"]].append(one)
    events = []
    for attempt in run["attempts"]:
        started_at, ended = _start_of(attempt), _time(attempt["ended_at"])
        inputs = [_input(attempt["resumed_from"], known)] if attempt["resumed_from"] else []
        facets = _facets(run, attempt)
        if started_at:
            events.append(
                _event(run, attempt, event_v2.RunState.START, started_at, facets, inputs, [])
            )
        ending = _ENDINGS.get(attempt["state"])
        if ending and ended:
            outputs = [_output(one) for one in written[attempt["number"]]]
            if attempt["reason"] or attempt["traceback"]:
                facets = facets | {"errorMessage": _error(attempt)}
            events.append(_event(run, attempt, ending, ended, facets, inputs, outputs))
    events.sort(key=lambda event: event.eventTime)
    return [Serde.to_dict(event) for event in events]


def _event(
    run: views.RunView,
    attempt: views.AttemptView,
    state: event_v2.RunState,
    at: str,
    facets: dict[str, Any],
    inputs: list[event_v2.InputDataset],
    outputs: list[event_v2.OutputDataset],
) -> event_v2.RunEvent:
    return event_v2.RunEvent(
        eventTime=at,
        eventType=state,
        producer=PRODUCER,
        run=event_v2.Run(runId=_attempt_id(run["uid"], attempt["number"]), facets=facets),
        job=event_v2.Job(namespace=NAMESPACE, name=run["run"], facets={"jobType": _JOB_TYPE}),
        inputs=inputs,
        outputs=outputs,
    )


def _facets(run: views.RunView, attempt: views.AttemptView) -> dict[str, Any]:
    started_at = _start_of(attempt)
    facets: dict[str, Any] = {
        "parent": facet_v2.parent_run.ParentRunFacet(
            run=facet_v2.parent_run.Run(runId=str(uuid.UUID(hex=run["uid"]))),
            job=facet_v2.parent_run.Job(namespace=NAMESPACE, name=run["name"]),
        ),
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet(
            version=holdfast_version(), name="holdfast"
        ),
    }
    if started_at:
        facets["nominalTime"] = facet_v2.nominal_time_run.NominalTimeRunFacet(
            nominalStartTime=started_at, nominalEndTime=_time(attempt["ended_at"])
        )
    return facets


def _start_of(attempt: views.AttemptView) -> str | None:
    return _time(attempt["started_at"]) or _time(attempt["submitted_at"])


def _time(moment: str | None) -> str | None:
    """Return a time of the index; None for a text that is not a time, which the format forbids."""
    return None if unix_time(moment) is None else moment


def _error(attempt: views.AttemptView) -> facet_v2.error_message_run.ErrorMessageRunFacet:
    return facet_v2.error_message_run.ErrorMessageRunFacet(
        message=attempt["reason"] or f"{attempt['state']}: {attempt['cause']}",
        programmingLanguage="python",
        stackTrace=attempt["traceback"],
    )


def _input(identity: str, known: Mapping[str, tuple[str, str | None]]) -> event_v2.InputDataset:
    """Return the dataset of a checkpoint; one that is not in the index has its id as name."""
    if identity not in known:
        return event_v2.InputDataset(namespace=NAMESPACE, name=identity)
    path, checksum = known[identity]
    return event_v2.InputDataset(namespace=FILES, name=path, facets=_version(checksum))


def _output(one: views.CheckpointView) -> event_v2.OutputDataset:
    return event_v2.OutputDataset(
        namespace=FILES, name=one["path"], facets=_version(one["checksum"])
    )


def _version(checksum: str | None) -> dict[str, Any]:
    if not checksum:
        return {}
    facet = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=checksum)
    return {"version": facet}


def _attempt_id(uid: str, number: int) -> str:
    """Return the UUID of an attempt. It is the same at every export."""
    # Derived from the run's uid, so a repeated export updates the same run in the catalogue.
    return str(uuid.uuid5(uuid.UUID(hex=uid), f"attempt-{number:04d}"))
