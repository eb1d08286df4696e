"""Browser sessions and the login throttle."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from holdfast.api.tokens import Token, TokenStore

COOKIE: Final = "holdfast_session"
CSRF_HEADER: Final = "x-holdfast-csrf"
SESSION_S_MAX: Final = 12 * 3600.0
SESSIONS_MAX: Final = 10_000
TRIES_MAX: Final = 10
TRIES_WINDOW_S: Final = 60.0
ADDRESSES_MAX: Final = 10_000


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
