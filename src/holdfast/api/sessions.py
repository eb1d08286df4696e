"""Browser sessions, the login throttle, and the record of logins.

Nobody can fill up the record by failing to log in.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.api.problems import LOG
from holdfast.api.tokens import Token, TokenStore
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.journal import EventKind, JournalWriter, journal_lock
from holdfast.contracts.disk.paths import holdfast_home
from holdfast.contracts.errors import ForeignFileError

COOKIE: Final = "holdfast_session"
CSRF_HEADER: Final = "x-holdfast-csrf"
SESSION_S_MAX: Final = 12 * 3600.0
SESSIONS_MAX: Final = 10_000
TRIES_MAX: Final = 10
TRIES_WINDOW_S: Final = 60.0
ADDRESSES_MAX: Final = 10_000
AUDIT_WRITER: Final = "api"
AUDIT_WINDOW_S: Final = 60.0
AUDITED_ADDRESSES_MAX: Final = 20
OTHER_ADDRESSES: Final = "other addresses"
AUDIT_BYTES_MAX: Final = 8 << 20
AUDIT_LOCK_S: Final = 5.0


@dataclass(frozen=True)
class _Session:
    token: str
    csrf: str
    ends_at: float


class Sessions:
    """The browser sessions, in memory. After a restart of the server, users must log in again.

    The cookie is random and only its digest is kept. A session ends when its token is revoked.
    """

    def __init__(self, tokens: TokenStore) -> None:
        self._tokens = tokens
        self._there: OrderedDict[bytes, _Session] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, token: Token) -> tuple[str, str]:
        """Start a session; return the cookie's value and the CSRF token."""
        text, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        with self._lock:
            # By the monotonic clock, so that a clock that is set cannot extend a session.
            self._there[_key(text)] = _Session(token.id, csrf, time.monotonic() + SESSION_S_MAX)
            while len(self._there) > SESSIONS_MAX:
                self._there.popitem(last=False)
        return text, csrf

    def find(self, text: str) -> tuple[Token, str] | None:
        """Return the token and the CSRF token of a session, or None if there is none or it ended.

        `text` is the cookie's value.
        """
        with self._lock:
            session = self._there.get(_key(text))
            if session is not None and session.ends_at < time.monotonic():
                del self._there[_key(text)]
                session = None
        # Looked up at each request, so that a revoked token ends its sessions, see decision 40.
        token = self._tokens.find(session.token) if session else None
        return (token, session.csrf) if token and session else None

    def close(self, text: str) -> None:
        """End a session. Does nothing if it has already ended."""
        with self._lock:
            self._there.pop(_key(text), None)


class LoginThrottle:
    """Limits failed logins: at most `TRIES_MAX` per address within `TRIES_WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, list[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """Return the seconds until `address` may try again, or 0 if it may try now."""
        now = time.monotonic()
        with self._lock:
            times = [at for at in self._failed.get(address, ()) if now - at < TRIES_WINDOW_S]
            if times:
                self._failed[address] = times
            else:
                self._failed.pop(address, None)
        return TRIES_WINDOW_S - (now - times[0]) if len(times) >= TRIES_MAX else 0.0

    def addresses(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._failed)

    def failed(self, address: str) -> None:
        with self._lock:
            self._failed.setdefault(address, []).append(time.monotonic())
            self._failed.move_to_end(address)
            # Bounded, because each address of a botnet would add an entry.
            while len(self._failed) > ADDRESSES_MAX:
                self._failed.popitem(last=False)


def same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _key(text: str) -> bytes:
    # Only the digest is kept, so the server's memory has no cookie that works.
    return hashlib.sha256(text.encode()).digest()


class SessionAudit:
    """Records logins, failed logins and logouts in the journal of the Holdfast home.

    Anyone who reaches the port can fail to log in. So the first failure from an address within
    `AUDIT_WINDOW_S` seconds is one line, and the others are counted in a second line after that
    time. Beyond `AUDITED_ADDRESSES_MAX` addresses, one line counts for all others. A file of
    `AUDIT_BYTES_MAX` bytes is moved to `api.1.jsonl`, replacing an older one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[tuple[str, int]] = Counter()
        self._timer: threading.Timer | None = None

    def record(self, action: str, address: str, **facts: Any) -> None:
        """Write one line. A failed write does not stop the action."""
        path = holdfast_home() / "journal" / f"{AUDIT_WRITER}.jsonl"
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
                self._timer = threading.Timer(AUDIT_WINDOW_S, self.flush)
                self._timer.daemon = True
                self._timer.start()
            known = (address, status)
            if known not in self._refused and len(self._refused) >= AUDITED_ADDRESSES_MAX:
                known = (OTHER_ADDRESSES, status)
            self._refused[known] += 1
            is_first = self._refused[known] == 1 and known[0] is not OTHER_ADDRESSES
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
            more = count if address is OTHER_ADDRESSES else count - 1
            if more:
                outcome = f"refused: {status}, {more} more within {AUDIT_WINDOW_S:.0f} s"
                self.record("log in", address, outcome=outcome, count=more)


def _rotate(path: Path) -> None:
    if not path.exists() or path.stat().st_size < AUDIT_BYTES_MAX:
        return
    with locked(journal_lock(path), AUDIT_LOCK_S) as is_locked:
        # Another server may have moved the file meanwhile.
        if is_locked and path.exists() and path.stat().st_size >= AUDIT_BYTES_MAX:
            path.replace(path.with_name(f"{AUDIT_WRITER}.1.jsonl"))
