"""What needs a person: live runs without a supervisor, that hang or fail again and again, and more.

The index knows what a run's processes wrote. A process that was killed writes nothing, so the watch
looks for the `signs` of its life. All clients share one answer, which is at most `FRESH_S` old, and
newer than the last change of these signs. While one request renews it, the others get the last one,
unless that is `STALE_S` old. `findings` judges what the journals say.

A run's journal has the acknowledgements of its problems. A problem of a root belongs to no run, so
this server keeps its acknowledgement in a file beside its tokens, until the problem is solved.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.api import capacity, findings, problems
from holdfast.api.schemas import Acknowledged, AttentionItem, WaitingRun
from holdfast.api.signs import LifeSigns
from holdfast.api.steering import read_supervision
from holdfast.api.store import STEERING, IndexStore
from holdfast.api.watch import Watch
from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError, NotFoundError
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.records.alerts import KINDS
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.states import RunState
from holdfast.lineage.queries.views import RunRow, iso, iso_time
from holdfast.workers.nodes.heartbeats import live_step, read_heartbeats

FRESH_S: Final = 2.0
STALE_S: Final = 10.0
# With thousands of live runs, the first looks read a part of their journals each.
READ_S: Final = 0.3
ITEMS_MAX: Final = 200
# The text of an error may be a page long.
TEXT_CHARACTERS_MAX: Final = 500
_LEVELS: Final = ("bad", "warn")
# The acknowledgements of the roots' problems.
FILE: Final = "acknowledged.json"


@dataclass
class _Known:
    """What is known of a live run: its events up to `updated_at`."""

    checkpointing: Checkpointing | None
    updated_at: str = ""
    state: str = ""
    alerts: Sequence[Event] = ()
    saves: Sequence[Event] = ()
    queue: Sequence[Event] = ()
    protection: Sequence[Event] = ()
    steering: Sequence[Event] = ()
    acknowledged: dict[str, Acknowledged] = field(default_factory=dict)


class Attention:
    """Computes the list for all clients. Thread-safe."""

    def __init__(
        self, store: IndexStore, watch: Watch, roots: tuple[Path, ...], folder: Path
    ) -> None:
        """Keep the acknowledgements of the roots' problems in `folder`."""
        self._store, self._watch, self._roots = store, watch, roots
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._rows: list[RunRow] = []
        self._items: list[AttentionItem] = []
        self._looked_at, self._turns = float("-inf"), 0
        self._of_roots = RootAcknowledgements(folder)
        # Those that the index does not have yet, by the item's id.
        self._new: dict[str, Acknowledged] = {}

    def items(self) -> list[AttentionItem]:
        """Return what needs a person, the most severe and oldest first. Raises `LineageError`."""
        if self._is_fresh():
            return self._items
        if not self._lock.acquire(blocking=time.monotonic() - self._looked_at >= STALE_S):
            return self._items
        try:
            if not self._is_fresh():
                # Before the look, because the watch may find something meanwhile.
                self._turns = self._watch.turns
                self._items = self._look()[:ITEMS_MAX]
                self._looked_at = time.monotonic()
            return self._items
        finally:
            self._lock.release()

    def _is_fresh(self) -> bool:
        is_recent = time.monotonic() - self._looked_at < FRESH_S
        return is_recent and self._turns == self._watch.turns

    def queue(self) -> list[WaitingRun]:
        """Return the runs that wait for GPUs, longest first. Raises `LineageError`."""
        self.items()
        with self._lock:
            found = [
                _waiting(row, self._known[row["uid"]])
                for row in self._rows
                if row["state"] in {RunState.QUEUED, RunState.WAITING}
            ]
        return sorted(found, key=lambda one: (one.since is None, one.since or "", one.run))

    def find(self, identity: str) -> AttentionItem:
        """Return the item with this id. Raises `NotFoundError` if there is none now."""
        for item in self.items():
            if item.id == identity:
                return item
        raise NotFoundError(
            f"id {identity[:200]!r} is not in the list of what needs attention; it may be solved, "
            "so read GET /api/v1/attention again"
        )

    def acknowledge(self, item: AttentionItem, done: Acknowledged) -> AttentionItem:
        """Show that somebody acknowledged `item`; for a root's problem, record it on disk."""
        if item.uid is None:
            done = self._of_roots.add(item.id, done)
        with self._lock:
            self._new[item.id] = done
            shown = [
                one.model_copy(update={"acknowledged": done}) if one.id == item.id else one
                for one in self._items
            ]
            self._items = sorted(shown, key=_urgency)
        return item.model_copy(update={"acknowledged": done})

    def _look(self) -> list[AttentionItem]:
        rows = self._store.live_runs()
        known = {row["uid"]: self._known.get(row["uid"]) for row in rows}
        new = [uid for uid, one in known.items() if one is None]
        sections = self._store.checkpoint_sections(new)
        self._known = {
            uid: one or _Known(_checkpointing(sections.get(uid))) for uid, one in known.items()
        }
        self._rows = rows
        # After the queries, so that a slow database cannot use up the time of all looks.
        read_until = time.monotonic() + READ_S
        found = [item for row in rows for item in self._of_known(row, read_until)]
        found += self._of_storage(rows)
        kept = {item.id for item in found}
        self._new = {name: done for name, done in self._new.items() if name in kept}
        return sorted(found, key=_urgency)

    def _of_known(self, row: RunRow, read_until: float) -> list[AttentionItem]:
        try:
            return list(self._of_run(row, read_until))
        except NotFoundError:
            # The run was deleted since the list of live runs was read.
            return []

    def _of_run(self, row: RunRow, read_until: float) -> Iterable[AttentionItem]:
        uid = row["uid"]
        known, paths = self._known[uid], RunPaths(Path(row["path"]))
        is_new = (known.updated_at, known.state) != (row["updated_at"], row["state"])
        if is_new and time.monotonic() < read_until:
            self._read_events(row, known)
        if not known.updated_at:
            return
        found: list[findings.Finding] = []
        step = None
        # The list of runs says which folders cannot be read.
        with contextlib.suppress(OSError, HoldfastError):
            if signs := self._watch.signs(uid):
                found += [*_unsupervised(row, paths, known, signs), *_silent(row, paths, signs)]
            step = live_step(paths)
        kinds = {one["kind"] for one in found}
        is_silent, is_supervised = "silent" in kinds, "unsupervised" not in kinds
        told = findings.find(_facts(row, known, step, is_supervised=is_supervised))
        found += [one for one in told if not (is_silent and one["kind"] == "node_silent")]
        for one in found:
            identity = ":".join((uid, one["kind"], one["mark"]))
            done = known.acknowledged.get(identity) or self._new.get(identity)
            yield _item(one, identity, row["run"], uid, done)

    def _read_events(self, row: RunRow, known: _Known) -> None:
        """Read what the run's state needs."""
        uid, waits = row["uid"], row["state"] in {RunState.QUEUED, RunState.WAITING}
        acknowledged = (EventKind.ALERT_ACKNOWLEDGED,)
        own = (findings.QUEUE, (), ()) if waits else ((), findings.SAVES, findings.PROTECTION)
        found = self._store.newest_of_each(uid, (KINDS, STEERING, acknowledged, *own))
        known.alerts, known.steering, lines, known.queue, known.saves, known.protection = found
        known.acknowledged = acknowledged_in(lines)
        known.updated_at, known.state = row["updated_at"], row["state"]

    def _of_storage(self, rows: Sequence[RunRow]) -> list[AttentionItem]:
        """Report roots, of this server and of live runs, whose file system is nearly full."""
        sizes: dict[Path, int] = dict.fromkeys(self._roots, 0)
        for row in rows:
            root, saves = Path(row["root"]), self._known[row["uid"]].saves
            commits = [one.data.get("bytes") for one in saves if one.kind is EventKind.COMMITTED]
            newest = commits[-1] if commits else 0
            sizes[root] = sizes.get(root, 0) + (newest if isinstance(newest, int) else 0)
        full = capacity.find_full_roots(sizes)
        items = []
        for root, one in full:
            identity = f"{root}:{one['kind']}"
            done = self._of_roots.get(identity)
            items.append(_item(one, identity, None, None, done))
        self._of_roots.keep(item.id for item in items)
        return items


def _unsupervised(
    row: RunRow, paths: RunPaths, known: _Known, signs: LifeSigns
) -> list[findings.Finding]:
    # The order that continues a paused run starts a supervisor.
    if not signs.is_unsupervised or row["state"] == RunState.PAUSED:
        return []
    since = signs.supervised_at
    supervision = read_supervision(paths, known.steering, row["created_at"], since)
    if supervision.is_alive is not False:
        return []
    host, pid = supervision.host, supervision.pid
    last = f"; the last one, process {pid} on {host}, is gone" if host else ""
    text = f"no supervisor is running, so the run does not continue after a failure{last}"
    action = "Relaunch starts a new supervisor"
    if supervision.is_remote:
        action = f"check {host}, whose lock may not be visible here, then Relaunch"
    starts = [event.time for event in known.steering if event.kind is EventKind.SUPERVISED]
    mark = max(starts, default=0.0)
    return [findings.finding("unsupervised", "bad", text, since, action, mark=mark)]


def _silent(row: RunRow, paths: RunPaths, signs: LifeSigns) -> list[findings.Finding]:
    """Report an attempt that runs by the index, and whose agent writes no more heartbeats."""
    number = signs.attempt
    if row["state"] != RunState.RUNNING or not signs.is_silent or number is None:
        return []
    attempt = paths.attempt(number)
    # An agent that ends by itself leaves an outcome before its last heartbeat.
    if filesystems.is_there(attempt.outcome):
        return []
    agent = findings.agent_on([beat.host for beat in read_heartbeats(attempt)], attempt=number)
    since = time.time() - signs.silent_s
    seen = findings.clock_time(since)
    text = f"{agent} has sent no heartbeats since {seen}, so it or its host is dead"
    return [findings.finding("silent", "bad", text, since, findings.RELAUNCH, mark=number)]


def _checkpointing(section: Any) -> Checkpointing | None:
    """Return the `checkpoint` section of a spec; None if this version cannot read it."""
    # A newer version may have recorded keys that this one cannot read, see decision 44.
    with contextlib.suppress(ValidationError):
        return _read_checkpointing(json.dumps(section or {}, sort_keys=True))
    return None


@functools.lru_cache(maxsize=256)
def _read_checkpointing(section: str) -> Checkpointing:
    # The runs of a site have few different sections, and reading one takes a while.
    return Checkpointing.read(json.loads(section))


def _facts(
    row: RunRow, known: _Known, step: int | None, *, is_supervised: bool
) -> findings.RunFacts:
    checkpointing = known.checkpointing
    return findings.RunFacts(
        state=row["state"],
        now=time.time(),
        reason=row["reason"],
        job_id=row["job_id"],
        alerts=known.alerts,
        saves=known.saves,
        queue=known.queue,
        protection=known.protection,
        committed_at=unix_time(row["committed_at"]),
        step=step,
        is_supervised=is_supervised,
        has_mirror=bool(checkpointing and checkpointing.mirror),
        interval_s=_interval_s(checkpointing),
    )


def _waiting(row: RunRow, known: _Known) -> WaitingRun:
    is_queued = row["state"] == RunState.QUEUED
    why, starts_at = findings.pending_reason(known.queue) if is_queued else ("", None)
    action = findings.advice(why, row["job_id"])[1] if is_queued else "Relaunch tries it now"
    reason = why or row["reason"]
    return WaitingRun(
        run=row["run"],
        uid=row["uid"],
        state=row["state"],
        user=row["created_by"],
        partition=row["partition"],
        gpus=row["world_size"],
        job_id=row["job_id"] if is_queued else None,
        since=iso(findings.waiting_since(row["state"], known.queue)),
        reason=reason[:TEXT_CHARACTERS_MAX] if reason else None,
        starts_at=iso(starts_at),
        action=action,
    )


def _interval_s(checkpointing: Checkpointing | None) -> float | None:
    return checkpointing.interval_s if checkpointing is not None else None


def _item(
    one: findings.Finding,
    identity: str,
    run: str | None,
    uid: str | None,
    done: Acknowledged | None,
) -> AttentionItem:
    facts = {**one, "since": iso(one["since"]), "text": one["text"][:TEXT_CHARACTERS_MAX]}
    del facts["mark"]
    return AttentionItem.model_validate(
        {**facts, "id": identity, "run": run, "uid": uid, "acknowledged": done}
    )


def _urgency(item: AttentionItem) -> tuple[bool, int, str, str]:
    """Sort what is not acknowledged first, then by level, age and run."""
    done = item.acknowledged is not None
    # A problem whose beginning is unknown is the oldest.
    return done, _LEVELS.index(item.level), item.since or "", item.run or ""


class _Document(BaseModel):
    """The file: the acknowledgements by the id of the problem."""

    model_config = ConfigDict(extra="ignore")

    roots: dict[str, Acknowledged] = {}


def acknowledged_in(events: Iterable[Event]) -> dict[str, Acknowledged]:
    """Return the acknowledgements in a journal by the problem's id; the first one counts."""
    found: dict[str, Acknowledged] = {}
    for event in events:
        texts = (event.data.get(key) for key in ("by", "note"))
        by, note = (one if isinstance(one, str) else "" for one in texts)
        done = Acknowledged(by=by, at=iso_time(event.time), note=note)
        found.setdefault(str(event.data.get("alert")), done)
    return found


class RootAcknowledgements:
    """The acknowledgements of the roots' problems. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._found = self._read()

    def get(self, identity: str) -> Acknowledged | None:
        return self._found.get(identity)

    def add(self, identity: str, done: Acknowledged) -> Acknowledged:
        """Record an acknowledgement and return the one that counts, which is the first."""
        with self._lock:
            if identity not in self._found:
                self._write({**self._found, identity: done})
            return self._found[identity]

    def keep(self, identities: Iterable[str]) -> None:
        """Forget the acknowledgements of all other problems, because they are solved."""
        with self._lock:
            kept = {name: self._found[name] for name in identities if name in self._found}
            if kept == self._found:
                return
            try:
                self._write(kept)
            except OSError as error:
                # The next look tries it again.
                problems.LOG.warning("%s: cannot be written: %s", self._path, error)

    def _read(self) -> dict[str, Acknowledged]:
        try:
            return dict(_Document.model_validate_json(self._path.read_bytes()).roots)
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            problems.LOG.warning("%s: cannot be read, so it counts as empty: %s", self._path, error)
            return {}

    def _write(self, found: dict[str, Acknowledged]) -> None:
        durable.make_directory(self._path.parent)
        content = durable.to_json(_Document(roots=found).model_dump(mode="json"))
        durable.write_bytes(self._path, content, mode=0o600)
        self._found = found
