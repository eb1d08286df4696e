"""Tokens: who may reach a server.

A token is `hold_<id>_<secret>`. The file keeps a salted SHA-256 of the secret, never the secret,
and is replaced as a whole, so that a server sees a token that was added or revoked at its next
request. The secret has 256 random bits, which no digest needs to be slow for: a slow one would
only let strangers occupy the server with wrong tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.contracts.durable import make_directory, to_json, write_bytes
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.paths import holdfast_home

FILE: Final = "tokens.json"
SECRET_BYTES: Final = 32
_TOKEN = re.compile(r"hold_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")


class Role(StrEnum):
    """What a token lets its holder do."""

    READER = "reader"
    OPERATOR = "operator"


class Token(BaseModel):
    """One token as it is kept; times are Unix seconds."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    role: Role
    salt: str
    digest: str
    created_at: float


class TokenFile(BaseModel):
    """The file's content."""

    tokens: list[Token] = []


class TokenStore:
    """The tokens of one server: `tokens.json` under the home, for its owner's eyes alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or holdfast_home() / FILE
        self._read: tuple[object, list[Token]] = (None, [])
        self._issued: list[Token] = []

    def tokens(self) -> list[Token]:
        """All tokens, oldest first. Raises `SpecError` when the file is not one of tokens."""
        try:
            facts = self.path.stat()
            stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if stamp != self._read[0]:
                found = TokenFile.model_validate_json(self.path.read_bytes())
                self._read = (stamp, found.tokens)
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise SpecError(
                f"{self.path}: not a file of tokens ({error.error_count()} problems); move it "
                "away and add the tokens again"
            ) from error
        return self._read[1]

    def add(self, name: str, role: Role) -> tuple[Token, str]:
        """A new token and its text, which is not kept. Raises `SpecError` for a name in use."""
        if not _NAME.fullmatch(name):
            raise SpecError(
                f"{name!r}: expected a name of up to 64 letters, digits, blanks and ._@-, which "
                "the records will show beside each action"
            )
        token, text = _make(name, role)
        with self._changing():
            tokens = self.tokens()
            if any(one.name == name for one in tokens):
                raise SpecError(
                    f"there is a token of the name {name!r}; give another name, or `holdfast "
                    f"token revoke {name!r}` first"
                )
            self._write([*tokens, token])
        return token, text

    def issue(self, name: str, role: Role) -> tuple[Token, str]:
        """A token and its text that are written nowhere: they end with this process."""
        token, text = _make(name, role)
        self._issued.append(token)
        return token, text

    def revoke(self, name: str) -> Token:
        """Take a token, given by name or id, out of use. Raises `NotFoundError`."""
        with self._changing():
            tokens = self.tokens()
            gone = next((one for one in tokens if name in {one.name, one.id}), None)
            if gone is None:
                raise NotFoundError(
                    f"no token of the name or id {name!r}; `holdfast token list` names those "
                    "there are"
                )
            self._write([one for one in tokens if one is not gone])
        return gone

    def find(self, identity: str) -> Token | None:
        """The token of that id while it is not revoked."""
        known = (*self._issued, *self.tokens())
        return next((one for one in known if one.id == identity), None)

    def check(self, text: str) -> Token | None:
        """The token that `text` is, or None."""
        match = _TOKEN.fullmatch(text)
        token = self.find(match[1]) if match else None
        if match is None or token is None:
            return None
        given = _digest(match[2], bytes.fromhex(token.salt)).hex()
        return token if hmac.compare_digest(given, token.digest) else None

    def _write(self, tokens: list[Token]) -> None:
        content = to_json(TokenFile(tokens=tokens).model_dump(mode="json"))
        write_bytes(self.path, content, mode=0o600)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One process at a time changes the file."""
        make_directory(self.path.parent)
        lock = self.path.with_suffix(".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _make(name: str, role: Role) -> tuple[Token, str]:
    """A new token and its text."""
    secret, salt = secrets.token_urlsafe(SECRET_BYTES), secrets.token_bytes(16)
    token = Token(
        id=secrets.token_hex(4),
        name=name,
        role=role,
        salt=salt.hex(),
        digest=_digest(secret, salt).hex(),
        created_at=time.time(),
    )
    return token, f"hold_{token.id}_{secret}"


def _digest(secret: str, salt: bytes) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()
