"""The access tokens of a server.

A token is `hold_<id>_<secret>`. The file stores a salted SHA-256 digest of the secret, never the
secret. It is replaced atomically, so a running server sees an added or revoked token at its next
request. A slow password hash is not needed, because the secret has 256 random bits. It would
only let clients without a token load the server with wrong ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.contracts.disk import durable, file_locks
from holdfast.contracts.disk.paths import holdfast_home
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.plain_text import counted

FILE: Final = "tokens.json"
SECRET_BYTES: Final = 32
# A change takes milliseconds.
LOCK_S: Final = 60.0
_TOKEN = re.compile(r"hold_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")


class Role(StrEnum):
    """What a token allows: `reader` may read, `operator` may also act."""

    READER = "reader"
    OPERATOR = "operator"


class Token(BaseModel):
    """One token as stored in the file. Times are Unix seconds. Without `expires_at`, it is valid
    until it is revoked.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    role: Role
    salt: str
    digest: str
    created_at: float
    expires_at: float | None = None

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


class TokensDocument(BaseModel):
    """The content of the token file."""

    tokens: list[Token] = []


class TokenStore:
    """The tokens of one server: `tokens.json` in the Holdfast home, readable by its owner only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or holdfast_home() / FILE
        self._read: tuple[object, list[Token]] = (None, [])
        self._issued: list[Token] = []

    def tokens(self) -> list[Token]:
        """Return all tokens in the file, oldest first. Raises `SpecError` for an invalid file."""
        try:
            facts = self.path.stat()
            stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            # A changed file is noticed at the next request, so revoking needs no restart.
            if stamp != self._read[0]:
                found = TokensDocument.model_validate_json(self.path.read_bytes())
                self._read = (stamp, found.tokens)
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise SpecError(
                f"{self.path}: not a valid token file "
                f"({counted(error.error_count(), 'problem')}); move it "
                "away and add the tokens again"
            ) from error
        return self._read[1]

    def add(self, name: str, role: Role, *, expires_at: float | None = None) -> tuple[Token, str]:
        """Create a token; return it and its text, which is not stored.

        It replaces an expired token of the same name. Raises `SpecError` if the name is invalid or
        in use.
        """
        if not _NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} is not a valid token name; expected up to 64 letters, digits, spaces "
                "and ._@-, beginning with a letter or digit"
            )
        token, text = _make(name, role, expires_at)
        with self._changing():
            tokens = [one for one in self.tokens() if one.name != name or not one.has_expired]
            if any(one.name == name for one in tokens):
                raise SpecError(
                    f"a token named {name!r} exists already; choose another name, or run "
                    f"`holdfast token revoke {name!r}` first"
                )
            self._write([*tokens, token])
        return token, text

    def issue(self, name: str, role: Role) -> tuple[Token, str]:
        """Create a token that is kept in memory only and ends with this process."""
        token, text = _make(name, role)
        self._issued.append(token)
        return token, text

    def revoke(self, name: str) -> Token:
        """Revoke the token with this name or id. Raises `NotFoundError` if there is none."""
        with self._changing():
            tokens = self.tokens()
            gone = next((one for one in tokens if name in {one.name, one.id}), None)
            if gone is None:
                raise NotFoundError(
                    f"there is no token with the name or id {name!r}; `holdfast token list` shows "
                    "all tokens"
                )
            self._write([one for one in tokens if one is not gone])
        return gone

    def find(self, identity: str) -> Token | None:
        """Return the token with this id, or None if it is unknown, revoked or has expired."""
        known = (*self._issued, *self.tokens())
        return next((one for one in known if one.id == identity and not one.has_expired), None)

    def check(self, text: str) -> Token | None:
        """Return the token whose text is `text`, or None if it is not valid."""
        match = _TOKEN.fullmatch(text)
        token = self.find(match[1]) if match else None
        if match is None or token is None:
            return None
        given = _digest(match[2], bytes.fromhex(token.salt)).hex()
        # In constant time, so the answer's duration tells nothing about the digest.
        return token if hmac.compare_digest(given, token.digest) else None

    def _write(self, tokens: list[Token]) -> None:
        content = durable.to_json(TokensDocument(tokens=tokens).model_dump(mode="json"))
        # Mode 0600 from its creation: there is no moment at which others can read it.
        durable.write_bytes(self.path, content, mode=0o600)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the file, so that only one process changes it at a time."""
        durable.make_directory(self.path.parent)
        lock = self.path.with_suffix(".lock")
        with file_locks.locked(lock, LOCK_S, owner_only=True) as is_locked:
            if not is_locked:
                raise TimeoutError(
                    f"{lock}: locked by another process for {LOCK_S:.0f} s; find the process with "
                    f"`fuser {lock}`"
                )
            yield


def _make(name: str, role: Role, expires_at: float | None = None) -> tuple[Token, str]:
    secret, salt = secrets.token_urlsafe(SECRET_BYTES), secrets.token_bytes(16)
    token = Token(
        id=secrets.token_hex(4),
        name=name,
        role=role,
        salt=salt.hex(),
        digest=_digest(secret, salt).hex(),
        created_at=time.time(),
        expires_at=expires_at,
    )
    return token, f"hold_{token.id}_{secret}"


def _digest(secret: str, salt: bytes) -> bytes:
    # Not a slow hash: the secret has 256 random bits, and a slow one would let strangers occupy the
    # server, see decision 40.
    return hashlib.sha256(salt + secret.encode()).digest()
