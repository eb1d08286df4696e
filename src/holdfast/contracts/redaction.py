"""Secret values taken out of whatever leaves the run's folder: SQL, API, command, logs, Prefect.

Secrets belong into references (`contracts.secrets`). This is for those that stand in a spec, a
log or a traceback all the same. It goes by names, by what follows them, and by forms that tokens
of well-known services have; what has neither is not recognised.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

HIDDEN: Final = "•••"
SECRET_CHARACTERS_MIN: Final = 6
# More than the longest secret that has a form, and the words before it by which it is known.
AROUND_BYTES: Final = 20 * 1024
# What of a name's words makes its value a secret, as the last word.
_LAST: Final = frozenset(
    (
        *("token", "secret", "secrets", "password", "passwd", "pwd", "passphrase"),
        *("apikey", "credential", "credentials", "dsn", "jwt", "authtoken", "accesskey"),
        *("secretkey",),
    )
)
# These are secrets in the names of variables, and else common words.
_LAST_OF_VARIABLE: Final = frozenset(("PASS", "PAT", "KEY", "AUTH"))
_BEFORE_KEY: Final = frozenset(
    (
        *("api", "access", "secret", "private", "ssh", "signing", "encryption", "account"),
        *("auth", "service", "license", "deploy", "storage", "master"),
    )
)
_BEFORE_PASS: Final = frozenset(
    (
        *("db", "user", "mysql", "pg", "postgres", "smtp", "redis", "ssh", "mail", "admin"),
        *("root", "proxy", "ftp", "http", "login", "sudo"),
    )
)
# Tokens of a text, and keys of data, are no secrets.
_TOKENS_OF_TEXT: Final = frozenset(
    (
        *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image", "start"),
        *("end", "stop", "next", "per", "last", "first", "prompt", "begin", "sot", "eot"),
        *("new", "extra", "audio"),
    )
)
_KEYS_OF_DATA: Final = frozenset(("PRIMARY", "SORT", "CACHE", "FOREIGN", "INDEX", "PARTITION"))
# The last one is the key of a reference, whose value is a name.
_NO_SECRET: Final = frozenset(
    ("PWD", "OLDPWD", "KEY", "PASS", "PAT", "AUTH", "SSH_AUTH", "prefect_secret")
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ASSIGNED: Final = re.compile(
    r"(?<![A-Za-z0-9_.-])-{0,2}(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,99})"
    r"""(?P<quote>["']?)(?P<between>\s{0,3}[=:]\s{0,3})"""
)
_OPTION: Final = re.compile(r"(?<!\S)--?(?P<name>[A-Za-z][A-Za-z0-9_-]{0,99})\s{1,3}(?![-\s])")
_QUOTED: Final = r""""[^"\n]{1,4096}"|'[^'\n]{1,4096}'"""
_ASSIGNED_VALUE: Final = re.compile(rf"""{_QUOTED}|[^\s"'&;,)}}\]]{{1,4096}}""")
_OPTION_VALUE: Final = re.compile(rf"""{_QUOTED}|[^\s"']{{1,4096}}""")
_URL: Final = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]{1,20}://(?P<user>[^/\s:@]{0,256}):(?P<value>[^/\s@]{1,1024})@"
)
_URL_TOKEN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://(?P<value>[^/\s:@]{20,1024})@")
_BEARER: Final = re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<value>[A-Za-z0-9+/._~-]{12,4096}=*)")
_HEADER: Final = re.compile(
    r"(?im)^[^\n:]{0,40}\b(?:authorization|x-api-key|cookie|set-cookie):"
    r"\s*(?P<value>[^\n\"']{4,4096})"
)
_KNOWN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?P<value>"
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dapi[0-9a-f]{32}|dckr_pat_[\w-]{20,}"
    r"|hf_[0-9a-f]{8}_[\w-]{43}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})"
)
_KEY_BLOCK: Final = re.compile(
    r"-----BEGIN (?P<kind>[A-Z ]{0,30}PRIVATE KEY)-----(?P<value>[\s\S]{1,16384}?)-----END"
)
# A text without any of these has no secret but one that is known as such.
_ANY: Final = re.compile(r"[=:@ ]|[a-z]_[A-Za-z0-9]|[a-z]-[A-Za-z0-9]|dapi|A[KS]IA|AIza|eyJ")
_NUMBER: Final = re.compile(r"[-+]?[0-9][0-9_.,]*(?:e[-+]?[0-9]+)?%?", re.IGNORECASE)
_PLACE: Final = frozenset(
    ("file", "path", "dir", "directory", "folder", "name", "id", "url", "error")
)


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """True for a name, of a key, a variable or an option, whose value is a secret."""
    plain = name.strip("-").rpartition(".")[2].replace("-", "_")
    if plain in _NO_SECRET:
        return False
    words = _WORD.findall(plain)
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    low = last.lower()
    if low in _LAST or low.endswith(("password", "passwd", "secret", "apikey")):
        return low != "token" or before.lower() not in _TOKENS_OF_TEXT
    if plain.isupper() and last in _LAST_OF_VARIABLE:
        return before not in _KEYS_OF_DATA
    if low == "key":
        return before.lower() in _BEFORE_KEY
    if low == "pass":
        return before.lower() in _BEFORE_PASS
    # `client_secret_value`, but no file that holds one.
    return "secret" in {word.lower() for word in words} and low not in _PLACE


def secrets_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The values in a spec that may not be shown wherever they turn up, longest first."""
    found = {value for _, value in _values_of(spec) if _is_long(value)}
    return tuple(sorted(found, key=len, reverse=True))


def places_of_secrets(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a spec whose values hold a secret in plain text, such as `environment.X`."""
    return tuple(dict.fromkeys(place for place, value in _values_of(spec) if _is_long(value)))


def _is_long(value: str) -> bool:
    """True for a value that can be told from other text."""
    return len(value) >= SECRET_CHARACTERS_MIN and not _NUMBER.fullmatch(value)


def redact(value: Any, secrets: Sequence[str] = ()) -> Any:
    """`value` of JSON with its secrets hidden: by the names of keys and options, and in texts."""
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _is_hidden(str(key), one) else redact(one, secrets)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            HIDDEN if is_option_value else redact(one, secrets)
            for one, is_option_value in _with_options(value)
        ]
    return value


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """The same for a text, such as a traceback."""
    parts, at = [], 0
    for start, end in spans(text, secrets):
        parts += [text[at:start], HIDDEN]
        at = end
    return "".join([*parts, text[at:]]) if parts else text


def mask_bytes(content: bytes, secrets: Sequence[str] = ()) -> bytes:
    """The same for a stretch of a file, whose length stays: each byte of a secret is a `*`."""
    # One byte is one character, so that places in the text are places in the file.
    text = content.decode("latin-1")
    masked = bytearray(content)
    spelled = [os.fsencode(secret).decode("latin-1") for secret in secrets]
    for start, end in spans(text, spelled):
        masked[start:end] = b"*" * (end - start)
    return bytes(masked)


def read_masked(file: BinaryIO, start: int, limit: int, secrets: Sequence[str] = ()) -> bytes:
    """`limit` bytes of a file from `start` on, masked as part of what is written around them.

    A stretch may begin or end inside a secret.
    """
    before = min(start, AROUND_BYTES)
    file.seek(start - before)
    content = mask_bytes(file.read(before + limit + AROUND_BYTES), secrets)
    return content[before : before + limit]


def spans(text: str, secrets: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Where in `text` there are secrets: pairs of beginning and end, in order, none in another."""
    found = sorted(_find(text, secrets))
    merged: list[tuple[int, int]] = []
    for start, end in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _find(text: str, secrets: Sequence[str]) -> Iterator[tuple[int, int]]:
    for secret in secrets:
        at = text.find(secret)
        while at >= 0:
            yield at, at + len(secret)
            at = text.find(secret, at + len(secret))
    if not _ANY.search(text):
        return
    for pattern in (_KNOWN, _BEARER, _HEADER, _KEY_BLOCK):
        for match in pattern.finditer(text):
            yield match.span("value")
    if "://" in text:
        for pattern in (_URL, _URL_TOKEN):
            for match in pattern.finditer(text):
                yield match.span("value")
    for match in _ASSIGNED.finditer(text):
        value = _value_after(_ASSIGNED_VALUE, text, match)
        if value and not _is_spoken(match, text[slice(*value)]):
            yield value
    for match in _OPTION.finditer(text):
        if value := _value_after(_OPTION_VALUE, text, match):
            yield value


def _value_after(
    pattern: re.Pattern[str], text: str, name: re.Match[str]
) -> tuple[int, int] | None:
    """Where the value of a secret name stands, without its quotes; None for other names."""
    found = pattern.match(text, name.end()) if is_secret(name["name"]) else None
    if found is None:
        return None
    start, end = found.span()
    return (start + 1, end - 1) if text[start] in "\"'" else (start, end)


def _is_spoken(name: re.Match[str], value: str) -> bool:
    """True for what a program says of tokens that are no secrets: `loss per token: 2.31`."""
    if value in {"None", "null"}:
        return True
    is_short = len(value) < SECRET_CHARACTERS_MIN or bool(_NUMBER.fullmatch(value))
    return is_short and ":" in name["between"] and not name["quote"]


def _is_hidden(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and is_secret(name)


def _with_options(values: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Each value, and True for one that a secret option before it takes."""
    is_taken = False
    for value in values:
        is_option = isinstance(value, str) and value.startswith("-")
        yield value, is_taken and isinstance(value, str) and not is_option
        is_taken = is_option and "=" not in value and is_secret(value)


def _values_of(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every secret value in JSON, each with its place: keys with dots between."""
    if isinstance(value, str):
        for start, end in spans(value):
            yield place, value[start:end]
    elif isinstance(value, Mapping):
        for key, one in value.items():
            here = f"{place}.{key}" if place else str(key)
            if _is_hidden(str(key), one):
                yield here, one
            else:
                yield from _values_of(one, here)
    elif isinstance(value, list | tuple):
        for one, is_option_value in _with_options(value):
            yield from ((place, one),) if is_option_value else _values_of(one, place)
