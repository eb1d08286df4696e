"""MLflow: one MLflow run for each run of Holdfast.

The server chooses the id of a run, so the run's journal has it. If a launch died between the two,
the tag `holdfast.run_uid` finds the run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
from holdfast.trainer.versions import require

UID_TAG: Final = "holdfast.run_uid"
# MLflow's own tags (`mlflow.utils.mlflow_tags`, mlflow 3.17).
PARENT_TAG: Final = "mlflow.parentRunId"


class MlflowTracker(Tracker):
    """A run of MLflow. A fork is a child of the run that it was forked from."""

    name: ClassVar[str] = "mlflow"
    keeps_at_once: ClassVar[bool] = True

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Without `tracking_uri`, MLflow's own settings choose the server.

        Raises `PreflightError` if mlflow is missing or not supported.
        """
        require("mlflow")
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None
        self._id = ""
        self._url: str | None = None

    def open(self, run: TrackedRun) -> str:
        """Create or continue the MLflow run."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        experiment = self._find_experiment()
        self._id = run.known_id or self._find(experiment, run.uid) or self._create(experiment, run)
        self._client.update_run(self._id, status="RUNNING")
        self._url = page_of(str(self._client.tracking_uri), experiment, self._id)
        return self._id

    @property
    def url(self) -> str | None:
        """The run's page on the tracking server, or None if the store has none."""
        return self._url

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, is_orderly: bool) -> None:
        """Mark the MLflow run as ended. A relaunch continues it."""
        self._client.set_terminated(self._id, "FINISHED" if is_orderly else "FAILED")

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._experiment))

    def _find(self, experiment: str, uid: str) -> str | None:
        found = self._client.search_runs([experiment], f"tags.`{UID_TAG}` = '{uid}'")
        return str(found[0].info.run_id) if found else None

    def _create(self, experiment: str, run: TrackedRun) -> str:
        tags = {f"holdfast.{name}": value for name, value in run.facts.items()}
        if run.parent_id:
            tags[PARENT_TAG] = run.parent_id
        made = self._client.create_run(experiment, tags={**self._tags, **tags}, run_name=run.name)
        return str(made.info.run_id)


def page_of(tracking_uri: str, experiment: str, run: str) -> str | None:
    """Return the address of a run's page. A folder or a database has none."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in {"http", "https"}:
        return None
    # Everyone who reads the run would read the password of the address.
    host = parts.netloc.rpartition("@")[2]
    path = f"{parts.path.rstrip('/')}/#/experiments/{experiment}/runs/{run}"
    return f"{parts.scheme}://{host}{path}"
