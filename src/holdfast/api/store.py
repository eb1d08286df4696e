"""What the routes ask the index, and where a run lies; ids are checked before they are used."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from holdfast.api.schemas import CheckpointRow, Page
from holdfast.contracts.alerts import KINDS
from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.redaction import secrets_of
from holdfast.contracts.secrets import longest_first, referred_secrets
from holdfast.contracts.states import RunState
from holdfast.lineage import (
    comparison,
    durability,
    nodes,
    pages,
    queries,
    reports,
    series,
    totals,
    views,
)
from holdfast.lineage.cursors import PAGE_MAX
from holdfast.lineage.cursors import Page as IndexPage
from holdfast.lineage.index import Index
from holdfast.lineage.openlineage import export_run
from holdfast.lineage.pages import CheckpointFilter, EventFilter, RunFilter, RunSort, SortOrder
from holdfast.lineage.queries import RunRef

# A name, a folder's name or a uid: never a path.
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
LIVE: Final = tuple(state for state in RunState if state.is_live)
LIVE_PAGES_MAX: Final = 20
TOLD_MAX: Final = 200
STEERING: Final = (EventKind.OPERATOR_REQUEST, EventKind.SUPERVISED)
SECRETS_MAX: Final = 10_000

T = TypeVar("T")
P = ParamSpec("P")


def in_one_read(
    method: Callable[Concatenate[Store, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """The method reads one state of the index, in one transaction."""

    def look(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.index.open().consistent_read():
            return method(self, *args, **kwargs)

    functools.update_wrapper(look, method)
    return look


class Store:
    """The index, asked by several threads at once; it may be away, and come again."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._secrets: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}

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
        ref = self.find_run(run)
        paths = ref.paths
        record = read_document(RunRecord, paths.spec)
        # Another cluster's run of the same path is in the index too, and not on this machine.
        if record is None or record.uid != ref.uid:
            raise NotFoundError(
                f"{paths.directory}: the run's folder is gone, or its root is not mounted; what "
                "the index last knew of it can still be read"
            )
        return paths

    def secrets(self, run: str) -> tuple[str, ...]:
        """The values that nobody is told: those in the run's spec, and those it refers to.

        A spec never changes, but a file that it refers to may.
        """
        ref = self.find_run(run)
        if ref.uid not in self._secrets:
            record = read_document(RunRecord, ref.paths.spec)
            spec = record.spec if record else self.show_run(ref.uid)["spec"]
            if len(self._secrets) >= SECRETS_MAX:
                self._secrets.clear()
            environment = {"environment": spec.get("environment")}
            self._secrets[ref.uid] = secrets_of(spec), environment
        plain, environment = self._secrets[ref.uid]
        return longest_first({*plain, *referred_secrets(environment, ref.paths)})

    def find_checkpoint(self, identity: str) -> tuple[RunRef, str]:
        """(run, directory's name) of `<run>:<directory>`. Raises `NotFoundError`."""
        run, colon, name = identity.rpartition(":")
        if not colon or not RUN_ID.fullmatch(run) or not CheckpointName.parse(name):
            raise NotFoundError(
                f"{identity[:250]!r}: not a checkpoint's id; expected <run>:step-NNNNNNNN.aNNNN.iNN"
            )
        return queries.find_checkpoint(self.index.open(), identity)

    def list_runs(
        self,
        where: RunFilter,
        sort: RunSort,
        after: str | None,
        limit: int,
        order: SortOrder | None = None,
    ) -> Page[views.RunRow]:
        """Runs, newest first unless sorted otherwise."""
        index = self.index.open()
        found = pages.list_runs(index, where, sort=sort, order=order, after=after, limit=limit)
        return _page(found)

    @in_one_read
    def show_run(self, run: str) -> views.RunView:
        """All about one run, until now."""
        return queries.show_run(self.index.open(), self.find_run(run).uid, now=time.time())

    @in_one_read
    def list_checkpoints(
        self,
        run: str,
        where: CheckpointFilter,
        *,
        newest_first: bool,
        after: str | None,
        limit: int,
    ) -> Page[CheckpointRow]:
        """A run's checkpoints by step, with what proves each."""
        uid = self.find_run(run).uid
        found = pages.list_checkpoints(
            self.index.open(),
            uid,
            where,
            newest_first=newest_first,
            after=after,
            limit=limit,
        )
        return Page(items=self._with_durability(uid, found.items), next=found.next)

    @in_one_read
    def show_checkpoint(self, identity: str) -> CheckpointRow:
        """One checkpoint. Raises `NotFoundError`."""
        run, name = self.find_checkpoint(identity)
        parsed = CheckpointName.parse(name)
        step = parsed.step if parsed else None
        where = CheckpointFilter(step_from=step, step_to=step)
        found = pages.list_checkpoints(self.index.open(), run.uid, where, limit=PAGE_MAX)
        for row in found.items:
            if row["id"].endswith(f":{name}"):
                return self._with_durability(run.uid, [row])[0]
        raise NotFoundError(f"{identity}: it was in the index a moment ago, and is no more")

    def has_mirror(self, identity: str) -> bool:
        """Whether the spec of a checkpoint's run names a mirror."""
        run, _ = self.find_checkpoint(identity)
        checkpoint = queries.read_spec(self.index.open(), run.uid).get("checkpoint")
        return isinstance(checkpoint, dict) and bool(checkpoint.get("mirror"))

    @in_one_read
    def list_files(self, identity: str) -> list[reports.FileView]:
        """The first files of a checkpoint, as its manifest lists them."""
        run, name = self.find_checkpoint(identity)
        return comparison.list_files(self.index.open(), f"{run.uid}:{name}")

    @in_one_read
    def ancestry(self, identity: str) -> list[reports.Ancestor]:
        """A checkpoint and its ancestors, young to old."""
        run, name = self.find_checkpoint(identity)
        return queries.ancestry(self.index.open(), f"{run.uid}:{name}")

    @in_one_read
    def compare(self, one: str, other: str) -> reports.Comparison:
        """Two checkpoints side by side."""
        ids = [f"{run.uid}:{name}" for run, name in map(self.find_checkpoint, (one, other))]
        return comparison.compare(self.index.open(), *ids)

    @in_one_read
    def list_events(
        self, run: str, where: EventFilter, *, newest_first: bool, after: str | None, limit: int
    ) -> Page[views.EventView]:
        """A run's journal lines by time."""
        found = pages.list_events(
            self.index.open(),
            self.find_run(run).uid,
            where,
            newest_first=newest_first,
            after=after,
            limit=limit,
        )
        return _page(found)

    def told(self, run: str) -> list[Event]:
        """The newest lines that `contracts.alerts` puts into words, oldest first."""
        return self._newest(run, KINDS)

    def steering(self, run: str) -> list[Event]:
        """The newest requests of operators and beginnings of supervision, oldest first."""
        return self._newest(run, STEERING)

    @in_one_read
    def timeline(self, run: str) -> list[reports.Segment]:
        """What each attempt of a run did when, until now."""
        return queries.timeline(self.index.open(), self.find_run(run).uid, now=time.time())

    def _newest(self, run: str, kinds: Sequence[EventKind]) -> list[Event]:
        where = EventFilter(kinds=tuple(str(kind) for kind in kinds))
        page = self.list_events(run, where, newest_first=True, after=None, limit=TOLD_MAX)
        return [
            Event(
                writer=Path(row["journal"]).stem,
                launch=row["launch"],
                sequence=row["sequence"],
                time=datetime.fromisoformat(row["time"]).timestamp(),
                kind=EventKind(row["kind"]),
                data=row["data"],
            )
            for row in reversed(page.items)
        ]

    @in_one_read
    def lineage(self, run: str) -> views.Graph:
        """What a run came from and what came of it."""
        index, uid = self.index.open(), self.find_run(run).uid
        return durability.add_durability(index, uid, queries.lineage_graph(index, uid))

    def _with_durability(
        self, uid: str, rows: Sequence[views.CheckpointView]
    ) -> list[CheckpointRow]:
        names = [row["id"].rpartition(":")[2] for row in rows]
        known = durability.read_durability(self.index.open(), uid, names)
        return [
            CheckpointRow(**row, **known.get(name, durability.NOT_DURABLE))
            for name, row in zip(names, rows, strict=True)
        ]

    @in_one_read
    def openlineage(self, run: str) -> list[dict[str, Any]]:
        """A run as OpenLineage events."""
        return export_run(self.index.open(), self.find_run(run).uid)

    @in_one_read
    def metrics(self, run: str, names: tuple[str, ...], points: int) -> list[reports.Series]:
        """What a run logged, by launch."""
        uid = self.find_run(run).uid
        return series.metric_series(self.index.open(), uid, names=names, points=points)

    def list_nodes(self, after: str | None, limit: int) -> Page[reports.NodeRow]:
        """The machines and how often each failed."""
        return _page(nodes.list_nodes(self.index.open(), after=after, limit=limit))

    def node_faults(self, host: str) -> list[reports.NodeFault]:
        """A machine's newest faults."""
        return nodes.node_faults(self.index.open(), host)

    def list_storage(
        self,
        where: RunFilter,
        sort: RunSort,
        after: str | None,
        limit: int,
        order: SortOrder | None = None,
    ) -> Page[views.StorageRow]:
        """What each run's checkpoints take."""
        index = self.index.open()
        found = pages.list_storage(index, where, sort=sort, order=order, after=after, limit=limit)
        return _page(found)

    def storage_totals(self, where: RunFilter) -> totals.StorageTotals:
        """What the checkpoints of all runs that match take."""
        return totals.storage_totals(self.index.open(), where)

    def goodput_totals(self, where: RunFilter) -> totals.GoodputTotals:
        """Where the time of all runs that match went."""
        return totals.goodput_totals(self.index.open(), where)

    def ping(self) -> None:
        """Raises `LineageError` when the index does not answer."""
        self.count_runs()

    def count_runs(self) -> dict[str, int]:
        """How many runs are in each state."""
        return queries.count_runs(self.index.open())

    def live_runs(self) -> list[Mapping[str, Any]]:
        """The runs that are under way, newest first."""
        found: list[Mapping[str, Any]] = []
        after: str | None = None
        for _ in range(LIVE_PAGES_MAX):
            page = self.list_runs(RunFilter(states=LIVE), "created", after, PAGE_MAX)
            found += page.items
            after = page.next
            if after is None:
                break
        return found


def _page(found: IndexPage[T]) -> Page[T]:
    return Page(items=found.items, next=found.next)
