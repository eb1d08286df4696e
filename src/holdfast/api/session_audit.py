"""The record of logins and logouts, which nobody can fill up by failing to log in."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

from holdfast.api.problems import LOG
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.journal import EventKind, JournalWriter, journal_lock
from holdfast.contracts.disk.paths import holdfast_home
from holdfast.contracts.errors import ForeignFileError

WRITER: Final = "api"
WINDOW_S: Final = 60.0
ADDRESSES_MAX: Final = 20
OTHERS: Final = "other addresses"
FILE_BYTES_MAX: Final = 8 << 20
LOCK_S: Final = 5.0


class SessionAudit:
    """Records logins, failed logins and logouts in the journal of the Holdfast home.

    Anyone who reaches the port can fail to log in. So the first failure from an address within
    `WINDOW_S` seconds is one line, and the others are counted in a second line after that time.
    Beyond `ADDRESSES_MAX` addresses, one line counts for all others. A file of `FILE_BYTES_MAX`
    bytes is moved to `api.1.jsonl`, replacing an older one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[tuple[str, int]] = Counter()
        self._timer: threading.Timer | None = None

    def record(self, action: str, address: str, **facts: Any) -> None:
        """Write one line. A failed write does not stop the action."""
        path = holdfast_home() / "journal" / f"{WRITER}.jsonl"
        try:
            # The file is bounded, because anyone who reaches the port can add lines.
            _rotate(path)
            with JournalWriter(path) as journal:
                journal.append(EventKind.AUDIT, action=action, address=address, **facts)
        except (OSError, ForeignFileError) as error:
            LOG.warning("cannot write the audit line (%s): %s from %s", error, action, address)

    def refused(self, address: str, status: int) -> None:
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(WINDOW_S, self.flush)
                self._timer.daemon = True
                self._timer.start()
            known = (address, status)
            if known not in self._refused and len(self._refused) >= ADDRESSES_MAX:
                known = (OTHERS, status)
            self._refused[known] += 1
            is_first = self._refused[known] == 1 and known[0] is not OTHERS
        # Outside of the lock, which a slow disk would otherwise hold.
        if is_first:
            self.record("log in", address, outcome=f"refused: {status}")

    def flush(self) -> None:
        """Write the counts of the failed logins that have no line yet."""
        with self._lock:
            refused, self._refused = self._refused, Counter()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for (address, status), count in refused.items():
            more = count if address is OTHERS else count - 1
            if more:
                outcome = f"refused: {status}, {more} more within {WINDOW_S:.0f} s"
                self.record("log in", address, outcome=outcome, count=more)


def _rotate(path: Path) -> None:
    if not path.exists() or path.stat().st_size < FILE_BYTES_MAX:
        return
    with locked(journal_lock(path), LOCK_S) as is_locked:
        # Another server may have moved the file meanwhile.
        if is_locked and path.exists() and path.stat().st_size >= FILE_BYTES_MAX:
            path.replace(path.with_name(f"{WRITER}.1.jsonl"))
