"""What the routes ask the index, and where a run lies. Rows become models in `schemas`."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Final

from holdfast.api.paging import Page, page_of
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.states import RunState
from holdfast.lineage import queries, views
from holdfast.lineage.index import Index
from holdfast.lineage.queries import RunRef

# A name, a folder's name or a uid: never a path.
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
EVENTS_MAX: Final = 10_000


class Store:
    """The index, asked by several threads at once; it may be away, and come again."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def find_run(self, run: str) -> RunRef:
        """The run of that uid, folder or name. Raises `NotFoundError`, for a path too."""
        if not RUN_ID.fullmatch(run):
            raise NotFoundError(f"{run[:120]!r}: not the name of a run, nor a uid")
        return queries.find_run(self.index.open(), run)

    def by_folder(self, directory: Path) -> RunRef:
        """The run in a folder."""
        return queries.find_run(self.index.open(), str(directory))

    def folder_of(self, run: str) -> RunPaths:
        """The run's folder on disk. Raises `NotFoundError` when it is not there any more."""
        paths = self.find_run(run).paths
        if not paths.spec.is_file():
            raise NotFoundError(
                f"{paths.directory}: the run's folder is gone, or its root is not mounted; what "
                "the index last knew of it can still be read"
            )
        return paths

    def find_checkpoint(self, identity: str) -> tuple[RunRef, str]:
        """(run, directory's name) of `<run>:<directory>`. Raises `NotFoundError`."""
        run, colon, name = identity.rpartition(":")
        if not colon or not RUN_ID.fullmatch(run) or not CheckpointName.parse(name):
            raise NotFoundError(
                f"{identity[:250]!r}: not a checkpoint's id; expected <run>:step-NNNNNNNN.aNNNN.iNN"
            )
        return queries.find_checkpoint(self.index.open(), identity)

    def list_runs(
        self, states: tuple[str, ...], search: str | None, after: str | None, limit: int
    ) -> Page[views.RunSummary]:
        """Runs, newest first."""
        rows = queries.list_runs(self.index.open())
        if states:
            rows = [row for row in rows if row["state"] in states]
        if search:
            text = search.lower()
            rows = [r for r in rows if text in r["name"].lower() or text in r["run"].lower()]
        return page_of(rows, lambda row: row["uid"], after, limit)

    def show_run(self, run: str) -> views.RunView:
        """All about one run, until now."""
        return queries.show_run(self.index.open(), self.find_run(run).uid, now=time.time())

    def list_checkpoints(
        self, run: str, states: tuple[str, ...], after: str | None, limit: int
    ) -> Page[views.CheckpointView]:
        """A run's checkpoints, oldest first."""
        rows = queries.list_checkpoints(self.index.open(), self.find_run(run).uid)
        if states:
            rows = [row for row in rows if row["state"] in states]
        return page_of(rows, lambda row: row["id"], after, limit)

    def show_checkpoint(self, identity: str) -> views.CheckpointView:
        """One checkpoint."""
        run, name = self.find_checkpoint(identity)
        rows = queries.list_checkpoints(self.index.open(), run.uid)
        return next(row for row in rows if row["id"].endswith(f":{name}"))

    def ancestry(self, identity: str) -> list[views.CheckpointView]:
        """A checkpoint and its ancestors, young to old."""
        run, name = self.find_checkpoint(identity)
        return queries.ancestry(self.index.open(), f"{run.uid}:{name}")

    def list_events(
        self, run: str, kinds: tuple[str, ...], after: str | None, limit: int
    ) -> Page[views.EventView]:
        """A run's journal lines, newest first."""
        rows = queries.list_events(self.index.open(), self.find_run(run).uid, limit=EVENTS_MAX)
        rows = [row for row in reversed(rows) if not kinds or row["kind"] in kinds]
        return page_of(
            rows, lambda e: f"{e['journal']} {e['incarnation']} {e['sequence']}", after, limit
        )

    def lineage(self, run: str) -> views.Graph:
        """What a run came from and what came of it."""
        return queries.lineage_graph(self.index.open(), self.find_run(run).uid)

    def ping(self) -> None:
        """Raises `LineageError` when the index does not answer."""
        queries.list_runs(self.index.open(), limit=1)

    def count_runs(self) -> dict[str, int]:
        """How many runs are in each state."""
        return dict(Counter(row["state"] for row in queries.list_runs(self.index.open())))

    def live_runs(self) -> list[views.RunSummary]:
        """The runs that are under way."""
        rows = queries.list_runs(self.index.open())
        return [row for row in rows if RunState(row["state"]).is_live]

    def live_folders(self) -> list[Path]:
        """The folders of runs that were live when the index last heard of them."""
        return [Path(row["path"]) for row in self.live_runs()]
