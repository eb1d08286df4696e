"""The queries of the routes to the index. Ids are validated before they are used."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from holdfast.api.schemas import Page
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint, is_checkpoint
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.redaction import secrets_of
from holdfast.contracts.spec.secrets import longest_first, referred_secrets
from holdfast.contracts.states import RunState
from holdfast.lineage.index import Index
from holdfast.lineage.queries import (
    comparison,
    consumers,
    cursors,
    durability,
    folding,
    pages,
    reports,
    run_queries,
    totals,
    views,
)
from holdfast.lineage.queries.durability import CheckpointRow
from holdfast.lineage.queries.openlineage import export_run
from holdfast.lineage.queries.run_queries import RunRef

# A run's name, folder name or uid, but never a path.
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
LIVE: Final = tuple(state for state in RunState if state.is_live)
STEERING: Final = (EventKind.OPERATOR_REQUEST, EventKind.ORDER_STATE, EventKind.SUPERVISED)
SECRETS_MAX: Final = 10_000

T = TypeVar("T")
P = ParamSpec("P")


class SavedRow(NamedTuple):
    """The facts of a checkpoint that say which numbers of ranks can continue: `topology.Saved`."""

    name: str
    world_size: int
    topology: dict[str, Any]


class RunWithEvents(NamedTuple):
    """A run, its newest events by group, and the checkpoint that it would resume from."""

    shown: views.RunView
    events: list[list[Event]]
    newest: SavedRow | None


def in_one_read(
    method: Callable[Concatenate[IndexStore, P], T],
) -> Callable[Concatenate[IndexStore, P], T]:
    """Decorate a method so that all its queries run in one transaction and see one state."""

    def read(self: IndexStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # Several queries of one page must not see rows from before and after an ingest.
        with self.index.open().consistent_read():
            return method(self, *args, **kwargs)

    functools.update_wrapper(read, method)
    return read


class IndexStore:
    """Thread-safe queries to the index. The database may be unavailable for a while."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._secrets: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}

    def find_run(self, run: str) -> RunRef:
        """Return the run with this uid, folder name or name. A path raises `NotFoundError`."""
        return run_queries.find_run(self.index.open(), _no_path(run))

    def by_folder(self, directory: Path) -> RunRef:
        return run_queries.find_run(self.index.open(), str(directory))

    def folder_of(self, run: str) -> RunPaths:
        """Return the run's folder on disk. Raises `NotFoundError` if it does not exist."""
        ref = self.find_run(run)
        paths = ref.paths
        record = read_document(RunRecord, paths.spec)
        # The index may also contain a run of another cluster with the same path.
        if record is None or record.uid != ref.uid:
            raise NotFoundError(
                f"{paths.directory}: the run's folder was deleted, or its root is not mounted; "
                "only the data in the index is available"
            )
        return paths

    def secrets(self, run: str) -> tuple[str, ...]:
        """Return the run's secret values, longest first: those in its spec and those it refers to.

        The secrets in the spec are cached, because a spec never changes. Referenced secrets are
        read again, because their files may change.
        """
        ref = self.find_run(run)
        if ref.uid not in self._secrets:
            record = read_document(RunRecord, ref.paths.spec)
            spec = record.spec if record else self.show_run(ref.uid)["spec"]
            if len(self._secrets) >= SECRETS_MAX:
                self._secrets.clear()
            environment = {key: spec.get(key) for key in ("environment", "alerts")}
            self._secrets[ref.uid] = secrets_of(spec), environment
        plain, environment = self._secrets[ref.uid]
        return longest_first({*plain, *referred_secrets(environment, ref.paths)})

    def find_checkpoint(self, identity: str) -> tuple[RunRef, str]:
        """Return the run and the directory name of a checkpoint. Raises `NotFoundError`."""
        run, colon, name = identity.rpartition(":")
        if not colon or not RUN_ID.fullmatch(run) or not is_checkpoint(name):
            raise NotFoundError(
                f"{identity[:250]!r} is not a checkpoint id; expected "
                "<run>:step-NNNNNNNN.aNNNN.lNN, <run>:step-N, <run>:latest or <run>:best"
            )
        if not CheckpointName.parse(name):
            name = choose_checkpoint(self.folder_of(run), name)
        return run_queries.find_checkpoint(self.index.open(), f"{run}:{name}")

    def list_runs(
        self,
        where: pages.RunFilter,
        sort: pages.RunSort,
        after: str | None,
        limit: int,
        order: pages.SortOrder | None = None,
    ) -> Page[views.RunRow]:
        index = self.index.open()
        found = pages.list_runs(index, where, sort=sort, order=order, after=after, limit=limit)
        return _page(found)

    def list_all_runs(
        self, where: pages.RunFilter, sort: pages.RunSort, order: pages.SortOrder | None = None
    ) -> list[views.RunRow]:
        """Return all matching runs."""
        return pages.list_runs(self.index.open(), where, sort=sort, order=order, limit=None).items

    @in_one_read
    def filter_values(self) -> pages.FilterValues:
        """Return the values by which runs can be filtered."""
        return pages.filter_values(self.index.open())

    @in_one_read
    def show_run(self, run: str) -> views.RunView:
        return run_queries.show_run(self.index.open(), _no_path(run), now=time.time())

    @in_one_read
    def read_run(self, run: str, groups: Sequence[Sequence[EventKind]]) -> RunWithEvents:
        """Return one run with its newest events of each group of kinds."""
        shown = self.show_run(run)
        newest = pages.newest_on_branch(self.index.open(), shown["uid"])
        events = self.newest_of_each(shown["uid"], groups)
        return RunWithEvents(shown, events, SavedRow(**newest) if newest else None)

    @in_one_read
    def list_checkpoints(
        self,
        run: str,
        where: pages.CheckpointFilter,
        *,
        newest_first: bool,
        after: str | None,
        limit: int,
    ) -> Page[CheckpointRow]:
        """Return one page of a run's checkpoints, sorted by step, with their durability status."""
        found = durability.list_with_status(
            self.index.open(),
            _no_path(run),
            where,
            newest_first=newest_first,
            after=after,
            limit=limit,
        )
        return _page(found)

    @in_one_read
    def show_checkpoint(self, identity: str) -> CheckpointRow:
        """Return one checkpoint. Raises `NotFoundError`."""
        run, name = self.find_checkpoint(identity)
        parsed = CheckpointName.parse(name)
        step = parsed.step if parsed else None
        where = pages.CheckpointFilter(step_from=step, step_to=step)
        found = durability.list_with_status(
            self.index.open(), run.uid, where, limit=cursors.PAGE_MAX
        )
        for row in found.items:
            if row["id"].endswith(f":{name}"):
                return row
        raise NotFoundError(f"{identity}: the checkpoint was just removed from the index")

    def has_mirror(self, identity: str) -> bool:
        """Return True if the spec of the checkpoint's run sets a mirror."""
        run, _ = self.find_checkpoint(identity)
        checkpoint = run_queries.read_spec(self.index.open(), run.uid).get("checkpoint")
        return isinstance(checkpoint, dict) and bool(checkpoint.get("mirror"))

    @in_one_read
    def consumers_of(self, identity: str) -> list[views.ConsumerView]:
        run, name = self.find_checkpoint(identity)
        return consumers.consumers_of(self.index.open(), f"{run.uid}:{name}")

    @in_one_read
    def list_files(self, identity: str) -> list[reports.FileView]:
        run, name = self.find_checkpoint(identity)
        return comparison.list_files(self.index.open(), f"{run.uid}:{name}")

    @in_one_read
    def ancestry(self, identity: str) -> list[reports.Ancestor]:
        run, name = self.find_checkpoint(identity)
        return run_queries.ancestry(self.index.open(), f"{run.uid}:{name}")

    @in_one_read
    def compare(self, one: str, other: str) -> reports.Comparison:
        ids = [f"{run.uid}:{name}" for run, name in map(self.find_checkpoint, (one, other))]
        return comparison.compare(self.index.open(), *ids)

    @in_one_read
    def compare_runs(self, names: Sequence[str]) -> reports.RunsComparison:
        uids = [self.find_run(name).uid for name in names]
        return comparison.compare_runs(self.index.open(), uids)

    @in_one_read
    def list_events(
        self,
        run: str,
        where: pages.EventFilter,
        *,
        newest_first: bool,
        after: str | None,
        limit: int,
    ) -> Page[views.EventView]:
        found = pages.list_events(
            self.index.open(),
            _no_path(run),
            where,
            newest_first=newest_first,
            after=after,
            limit=limit,
        )
        return _page(found)

    @in_one_read
    def timeline(self, run: str) -> list[reports.Segment]:
        return run_queries.timeline(self.index.open(), _no_path(run), now=time.time())

    def read_spec(self, run: str) -> Mapping[str, Any]:
        """Return the run's spec as the index has it. Raises `NotFoundError`."""
        return run_queries.read_spec(self.index.open(), run)

    def newest_events(
        self, run: str, kinds: Sequence[EventKind], attempt: int | None = None
    ) -> list[Event]:
        """Return the run's newest events of these kinds, see `pages.newest_events`."""
        return pages.newest_events(self.index.open(), _no_path(run), kinds, attempt)

    def newest_of_each(self, uid: str, groups: Sequence[Sequence[EventKind]]) -> list[list[Event]]:
        """Return `newest_events` for each group of kinds, by one query.

        The run is one of `live_runs` or `read_run`, so this account may read it.
        """
        return pages.newest_of_each(self.index.open(), uid, groups)

    def checkpoint_sections(self, uids: Sequence[str]) -> dict[str, Any]:
        """Return the `checkpoint` section of the specs of runs in `live_runs`, by uid."""
        return run_queries.checkpoint_sections(self.index.open(), uids) if uids else {}

    @in_one_read
    def lineage(self, run: str) -> views.Graph:
        index, uid = self.index.open(), self.find_run(run).uid
        return durability.add_durability(index, uid, run_queries.lineage_graph(index, uid))

    def folded_lineage(self, run: str, opened: Sequence[str]) -> views.Graph:
        """Return the lineage with its long chains folded, see `folding`."""
        return folding.fold(self.lineage(run), opened)

    @in_one_read
    def openlineage(self, run: str) -> list[dict[str, Any]]:
        return export_run(self.index.open(), _no_path(run))

    @in_one_read
    def metrics(self, run: str, names: tuple[str, ...], points: int) -> list[reports.Series]:
        index = self.index.open()
        return totals.metric_series(index, _no_path(run), names=names, points=points)

    def list_nodes(self, after: str | None, limit: int) -> Page[reports.NodeRow]:
        return _page(totals.list_nodes(self.index.open(), after=after, limit=limit))

    def node_faults(self, host: str) -> list[reports.NodeFault]:
        return totals.node_faults(self.index.open(), host)

    def list_storage(
        self,
        where: pages.RunFilter,
        sort: pages.RunSort,
        after: str | None,
        limit: int,
        order: pages.SortOrder | None = None,
    ) -> Page[views.StorageRow]:
        index = self.index.open()
        found = pages.list_storage(index, where, sort=sort, order=order, after=after, limit=limit)
        return _page(found)

    def storage_totals(self, where: pages.RunFilter) -> totals.StorageTotals:
        return totals.storage_totals(self.index.open(), where)

    def goodput_totals(self, where: pages.RunFilter) -> totals.GoodputTotals:
        return totals.goodput_totals(self.index.open(), where)

    def goodput_groups(
        self, where: pages.RunFilter, by: totals.GroupBy
    ) -> list[totals.GoodputGroup]:
        return totals.goodput_groups(self.index.open(), where, by)

    def ping(self) -> None:
        """Raise `LineageError` if the index cannot be queried."""
        self.count_runs()

    def count_runs(self) -> dict[str, int]:
        return run_queries.count_runs(self.index.open())

    def live_runs(self) -> list[views.RunRow]:
        where = pages.RunFilter(states=LIVE)
        return pages.list_runs(self.index.open(), where, limit=None).items


def _no_path(run: str) -> str:
    # A client must not choose a path. The server would read any folder of its user.
    if not RUN_ID.fullmatch(run):
        raise NotFoundError(
            f"{run[:120]!r} is not a valid run; expected a run's name, folder name or uid"
        )
    return run


def _page(found: cursors.RowPage[T]) -> Page[T]:
    return Page(items=found.items, next=found.next)
