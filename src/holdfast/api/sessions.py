"""Who is logged in from a page, and how often a stranger may try."""

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
    """Sessions of pages, in memory: a server that starts again asks everybody to log in again.

    What a cookie holds is random; only its digest is kept. A session ends with its token.
    """

    def __init__(self, tokens: TokenStore) -> None:
        self._tokens = tokens
        self._there: OrderedDict[bytes, _Session] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, token: Token) -> tuple[str, str]:
        """(what the cookie holds, the word that each change must carry)."""
        text, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        with self._lock:
            self._there[_key(text)] = _Session(token.id, csrf, time.monotonic() + SESSION_S_MAX)
            while len(self._there) > SESSIONS_MAX:
                self._there.popitem(last=False)
        return text, csrf

    def find(self, text: str) -> tuple[Token, str] | None:
        """The token behind a cookie and the session's word, or None when it is over."""
        with self._lock:
            session = self._there.get(_key(text))
            if session is not None and session.ends_at < time.monotonic():
                del self._there[_key(text)]
                session = None
        token = self._tokens.find(session.token) if session else None
        return (token, session.csrf) if token and session else None

    def close(self, text: str) -> None:
        """Log out; harmless when repeated."""
        with self._lock:
            self._there.pop(_key(text), None)


class LoginThrottle:
    """How often each address has failed to log in of late."""

    def __init__(self, most: int = TRIES_MAX, window_s: float = TRIES_WINDOW_S) -> None:
        self._most = most
        self._window_s = window_s
        self._failed: OrderedDict[str, list[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """Seconds until `address` may try again, 0 when it may now."""
        now = time.monotonic()
        with self._lock:
            times = [at for at in self._failed.get(address, ()) if now - at < self._window_s]
            if times:
                self._failed[address] = times
            else:
                self._failed.pop(address, None)
        return self._window_s - (now - times[0]) if len(times) >= self._most else 0.0

    def addresses(self) -> frozenset[str]:
        """The addresses that failed of late."""
        with self._lock:
            return frozenset(self._failed)

    def failed(self, address: str) -> None:
        """Remember one more failure."""
        with self._lock:
            self._failed.setdefault(address, []).append(time.monotonic())
            self._failed.move_to_end(address)
            while len(self._failed) > ADDRESSES_MAX:
                self._failed.popitem(last=False)


def same(given: str, expected: str) -> bool:
    """Compare two secrets in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
