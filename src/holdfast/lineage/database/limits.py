"""How long a use of the database may take: queries, writes, reindexing and migrations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

# The wait for a connection of a pool whose connections are all in use.
POOL_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class DatabaseLimits:
    """Limits in seconds; 0 means never.

    `silent_s` bounds the wait for PostgreSQL. With `is_patient`, the client asks the server over
    another connection whether it still works on the statement, and continues to wait if it does.
    The server ends a statement after `statement_s`. A wait for a lock ends after `lock_s`, in
    SQLite too.
    """

    silent_s: float
    statement_s: int
    lock_s: int
    is_patient: bool


# For queries: the server ends a statement first, so a longer silence means that it hangs.
ORDINARY: Final = DatabaseLimits(silent_s=10.0, statement_s=9, lock_s=8, is_patient=False)
# For the rows of one run, which can be a million.
WRITES: Final = DatabaseLimits(silent_s=4.0, statement_s=600, lock_s=8, is_patient=True)
# For `reindex`, which takes minutes anyway.
REINDEX: Final = replace(WRITES, lock_s=120)
# For changes of the schema: they rewrite tables, and wait for everyone who uses these.
MIGRATIONS: Final = replace(WRITES, statement_s=0, lock_s=120)
