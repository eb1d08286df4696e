"""Which runs this account may see: those whose folders it may read on disk.

An index may be shared, and a run's folder may be private. At ingest, a run's row gets who may read
its folder: its owner, a group, or everyone. Each query has that condition. The disk corrects it,
because permissions change later and access lists are not in the mode. A folder that no longer
exists is judged by its row. Root sees all runs.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from holdfast.contracts.disk.paths import RunPaths
from holdfast.lineage.database.tables import RUNS, Row

# The disk is asked again after this time, or after so many times the time that asking took.
AGAIN_S: Final = 5.0
AGAIN_COSTS: Final = 20
ACCESS_LIST: Final = "system.posix_acl_access"
ALL_UIDS: Final = ["0", "0", "4294967295"]
_READ: Final = 0o4
_ENTER: Final = 0o1
_LIST: Final = _READ | _ENTER
# The columns that `may_read` needs.
PERMISSIONS: Final = ("directory", "owner_uid", "reader_gid", "is_public")


@dataclass(frozen=True)
class Account:
    """The account of this process."""

    uid: int
    groups: frozenset[int]
    is_root: bool

    @classmethod
    def current(cls) -> Account:
        uid = os.geteuid()
        return cls(uid, frozenset([os.getegid(), *os.getgroups()]), uid == 0 and _is_real_root())

    def may_by_row(self, row: Mapping[str, Any]) -> bool:
        """Return True if the folder could be read by this account when the row was written."""
        is_own = row["owner_uid"] == self.uid
        return bool(self.is_root or is_own or row["is_public"] or row["reader_gid"] in self.groups)


@dataclass(frozen=True)
class _Asked:
    """The runs, by uid, about which disk and rows differ; asked again after `until`."""

    account: Account
    until: float
    hidden: list[str]
    shown: list[str]


_ASKED: Final[WeakKeyDictionary[sa.Engine, _Asked]] = WeakKeyDictionary()
_ASKING: Final = threading.Lock()


def permissions_of(paths: RunPaths) -> Row:
    """Return the columns that say who may read a run's folder: owner, group or everyone.

    Each folder on the way counts, too. Where the mode does not say it, nobody else may.
    """
    owner, group = os.stat(paths.directory)[stat.ST_UID : stat.ST_GID + 1]
    is_public = is_group = True
    for path, wanted in _places(paths):
        try:
            facts = os.stat(path)
            is_listed = ACCESS_LIST in os.listxattr(path)
        except FileNotFoundError:
            continue
        except OSError:
            is_public = is_group = False
            break
        others = facts.st_mode & wanted == wanted
        members = facts.st_mode >> 3 & wanted == wanted
        is_public &= others and members
        # With an access list, the bits of the group are its mask.
        is_group &= members and not is_listed if facts.st_gid == group else others
    reader = group if is_group and not is_public else None
    return {"owner_uid": owner, "reader_gid": reader, "is_public": is_public}


def may_read(row: Mapping[str, Any], account: Account | None = None) -> bool:
    """Return True if this account may read the folder of a run's row, as the disk says now."""
    account = account or Account.current()
    if account.is_root or row["owner_uid"] == account.uid:
        return True
    folder = row["directory"]
    try:
        owner = os.lstat(folder).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return account.may_by_row(row)
    except OSError:
        return False
    if owner not in {row["owner_uid"], account.uid}:
        # Another account has put its own folder there.
        return account.may_by_row(row)
    paths = RunPaths(Path(folder))
    return (
        os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
        and os.access(paths.journal, os.R_OK | os.X_OK, effective_ids=True)
        and os.access(paths.spec, os.R_OK, effective_ids=True)
    )


def readable(
    connection: sa.Connection, query: sa.Select[Any], run: sa.Column[str] = RUNS.c.uid
) -> Any:
    """Return `query` for the runs that this account may read; `run` is the column of their uid."""
    condition = may_see(connection, run)
    return query if condition is None else query.where(condition)


def may_see(
    connection: sa.Connection, run: sa.Column[str] = RUNS.c.uid
) -> sa.ColumnElement[bool] | None:
    """Return the condition for the runs that this account may read; None for all of them."""
    account = Account.current()
    if account.is_root:
        return None
    asked = _ask(connection, account)
    is_own = run is RUNS.c.uid
    table = RUNS if is_own else RUNS.alias("seen")
    columns = table.c
    by_row = sa.or_(columns.is_public.is_(True), columns.reader_gid.in_(sorted(account.groups)))
    if asked.hidden:
        by_row = sa.and_(by_row, columns.uid.not_in(_listed(connection, "hidden", asked.hidden)))
    condition = sa.or_(columns.owner_uid == account.uid, by_row)
    if asked.shown:
        condition = sa.or_(condition, columns.uid.in_(_listed(connection, "shown", asked.shown)))
    return (
        condition
        if is_own
        else sa.select(table.c.uid).where(columns.uid == run, condition).exists()
    )


def _ask(connection: sa.Connection, account: Account) -> _Asked:
    """Return where the disk and the rows of other accounts' runs differ, asked not long ago."""
    known = _ASKED.get(connection.engine)
    if known and known.account == account and time.monotonic() < known.until:
        return known
    # While one thread asks, the others use what was known before.
    is_usable = known is not None and known.account == account
    if not _ASKING.acquire(blocking=not is_usable):
        assert known is not None
        return known
    try:
        began = time.monotonic()
        hidden: list[str] = []
        shown: list[str] = []
        for row in _others(connection, account):
            may = may_read(row, account)
            if may != account.may_by_row(row):
                (shown if may else hidden).append(row["uid"])
        now = time.monotonic()
        until = now + max(AGAIN_S, AGAIN_COSTS * (now - began))
        _ASKED[connection.engine] = asked = _Asked(account, until, hidden, shown)
        return asked
    finally:
        _ASKING.release()


def _others(connection: sa.Connection, account: Account) -> Iterator[Row]:
    owner = RUNS.c.owner_uid
    # Unlike `!=`, these conditions use the index.
    is_other = sa.or_(owner.is_(None), owner < account.uid, owner > account.uid)
    query = sa.select(*(RUNS.c[name] for name in ("uid", *PERMISSIONS))).where(is_other)
    for row in connection.execute(query).mappings():
        yield dict(row)


def _listed(connection: sa.Connection, name: str, uids: list[str]) -> Any:
    """Return a list of uids as one value of a statement, so that there may be any number."""
    if connection.dialect.name == "postgresql":
        return sa.select(sa.func.unnest(sa.bindparam(name, uids, sa.ARRAY(sa.Text()), unique=True)))
    listed = sa.func.json_each(sa.bindparam(name, json.dumps(uids), unique=True))
    return sa.select(listed.table_valued("value").c.value)


def _places(paths: RunPaths) -> Iterator[tuple[Path, int]]:
    """Yield what must be readable, each with the bits that a reader needs."""
    for folder in paths.directory.parents:
        yield folder, _ENTER
    yield paths.directory, _LIST
    yield paths.journal, _LIST
    yield paths.spec, _READ


@cache
def _is_real_root() -> bool:
    """Return False for the root of a container that stands for another account outside."""
    try:
        with open("/proc/self/uid_map") as mapped:
            return mapped.read().split() == ALL_UIDS
    except OSError:
        return True
