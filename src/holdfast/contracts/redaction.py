"""Removal of secret values from everything that leaves the run's folder.

That is: SQL, API, CLI, logs and Prefect. Users should give secrets by reference
(`contracts.secrets`). This module hides known values, and those that are in a spec, a log or a
traceback anyway: token formats of well-known services, logins in URLs and options, and values that
are assigned to the name of a secret. Other secrets are not recognised.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import string
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, BinaryIO, Final, cast


class _LazyPattern:
    """A regular expression that is compiled when it is first used.

    Compiling all of them takes a moment, and most commands hide nothing.
    """

    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self._text, self._flags), name)
        # The next use finds the method here, without this function.
        setattr(self, name, method)
        return method


def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    return cast(re.Pattern[str], _LazyPattern(text, flags))


HIDDEN: Final = "•••"
SECRET_CHARACTERS_MIN: Final = 6
# More than the longest recognised secret together with its name.
AROUND_BYTES: Final = 20 * 1024
# Names whose value is hidden whatever it is. The words of the name are in lower case.
_SECRET_NAME: Final = _pattern(
    r"token|.*(?:password|passwd|secret|apikey)s?"
    r"|(?:.*_)?(?:pwd|passphrase|jwt|dsn|cred|credential|authtoken|accesskey|secretkey)s?"
    r"|(?:.*_)?(?:api|access|secret|private|ssh|signing|encryption|account|auth|service|license"
    r"|deploy|storage|master|wandb|openai|anthropic|huggingface|hf|comet|neptune|aws|azure|gcp"
    r"|github|gitlab)_keys?"
    r"|(?:.*_)?authorization|(?:set_)?cookies?"
    r"|(?:.*_)?(?:api|access|auth|oauth|refresh|bearer|session|security|hf|gh|github|gitlab|wandb"
    r"|slack|bot)_tokens?|x_(?:.*_)?token|(?:.*_)?key_data"
    r"|(?:.*_)?(?:db|user|mysql|pg|postgres|smtp|redis|ssh|mail|admin|root|proxy|ftp|http|login"
    r"|sudo|key)_pass"
    # `client_secret_value`, but not `client_secret_file`.
    r"|(?:.*_)?secret_(?:.*_)?(?!(?:file|path|dir|directory|folder|name|id|url|error)$)[a-z]+"
)
_SECRET_VARIABLE: Final = _pattern(r".+_(?:PASS|PAT|AUTH|TOKEN)")
# Names whose value is hidden if it looks random: `HF_TOKENS`, `OPENAI_KEY` and `hf_token`, but also
# `max_tokens`, `METRIC_KEY` and `pad_token`.
_PERHAPS_SECRET_NAME: Final = _pattern(r"(?:.*_)?(?:tokens|pass|(?:bind)?pw)|.+_token|auth")
_PERHAPS_SECRET_VARIABLE: Final = _pattern(r".+_KEY")
# The value of such a variable is also hidden if it is one long word, such as a password, except for
# names and words of a choice. Several words, as in `eval_accuracy`, are a choice too.
_CHOICE_VARIABLE: Final = _pattern(
    r"(?:.*_)?(?:METRICS?|MONITOR|LOSS|SORT|ORDER|GROUP|CACHE|PRIMARY|FOREIGN|PARTITION|INDEX"
    r"|COLUMN|FEATURE|LABEL|TARGET|IMAGE|TEXT|INPUT|OUTPUT)_KEY"
)
_CHOICES: Final = frozenset(("accuracy", "perplexity", "precision", "timestamp", "throughput"))
_LONG_WORD: Final = _pattern(
    r"(?<![^,;(){}\[\]&|])(?P<word>[A-Za-z]{8,})(?=={0,2}(?:[,;(){}\[\]&|]|$))"
)
# `prefect_secret` is the key of a reference, and its value is a name.
_NO_SECRET: Final = frozenset(("PWD", "OLDPWD", "SSH_AUTH", "prefect_secret"))
_WORD: Final = _pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# A whole word. In a string of a program, `\n` is an escape, which is not a part of the word.
_BEGIN: Final = r"(?:(?<![A-Za-z0-9_.-])(?!(?<=\\)[nrt])|(?<=\\[nrt]))"
# Assignments, including `os.environ["NAME"] = "…"`, those in a string, and a tag of YAML.
_ASSIGNED: Final = _pattern(
    rf"{_BEGIN}[_-]{{0,2}}(?P<name>[A-Za-z][A-Za-z0-9_.-]{{0,99}})"
    r"""(?P<quote>\\{0,3}["']?)\]?(?P<between>\s{0,3}[=:]>?\s{0,3}(?:!{1,2}[a-z]{1,9}\s)?)"""
)
# `name: DB_PASSWORD, value: …`, as in the environment of a container.
_PAIRED: Final = _pattern(
    rf"{_BEGIN}(?P<name>[A-Za-z][A-Za-z0-9_.-]{{0,99}})"
    r"""\\{0,3}["']?[\s,;]{1,40}\\{0,3}["']?value\\{0,3}["']?\s{0,3}[=:]\s{0,3}"""
)
# `aws configure set aws_secret_access_key …`
_SPACED: Final = _pattern(
    r"(?<!\S)(?P<name>[A-Za-z][A-Za-z0-9]{0,50}_[A-Za-z0-9_]{1,50})[ \t]{1,3}(?!\s)"
)
# `os.environ.setdefault("NAME", "…")`, and a command as a list of strings.
_LISTED: Final = _pattern(
    r"""(?:[A-Za-z_]\(\s{0,3}["']|["']-{1,2})(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,99})["']"""
    r"""\s{0,3},\s{0,3}(?=["'])"""
)
_OPTION: Final = _pattern(r"(?<!\S)--?(?P<name>[A-Za-z][A-Za-z0-9_-]{0,99})\s{1,3}(?!\s)")
# With quotes, those of a string in a string, or truncated.
_QUOTED: Final = (
    r""""[^"\n]{1,4096}(?:"|(?=\n)|\Z)|'[^'\n]{1,4096}(?:'|(?=\n)|\Z)"""
    r"""|\\{1,3}"[^"\\\n]{1,4096}|\\{1,3}'[^'\\\n]{1,4096}"""
)
# A value without quotes ends at the end of its word. In a URL, it ends at the next parameter.
_WORD_VALUE: Final = _pattern(rf"""{_QUOTED}|[^\s"']{{1,4096}}""")
# A list or a table, which may be truncated. A reference contains no secret and is not hidden.
_GROUP_VALUE: Final = _pattern(
    r"""\[[^\]]{1,4096}\][^\s"']{0,4096}|\[[^\n]{1,4096}"""
    r"""|(?!\{\s{0,3}["']?(?:from_file|from_env|prefect_secret)\b)"""
    r"""(?:\{[^}]{1,4096}\}[^\s"']{0,4096}|\{[^\n]{1,4096})"""
)
# A text of several lines in YAML.
_BLOCK_VALUE: Final = _pattern(
    r"[|>][+-]?[ \t]{0,9}\r?\n(?P<value>(?:[ \t]{1,99}\S[^\n]{0,999}\n?){1,99})"
)
# An element of XML.
_ELEMENT: Final = _pattern(
    r"<(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,99})>\s{0,3}(?P<value>[^<>\s]{1,4096})\s{0,3}</"
)
_EMPTY: Final = _pattern(r"[\[{]\s{0,9}[\]}]")
_URL_VALUE: Final = _pattern(rf"""{_QUOTED}|[^\s"'&]{{1,4096}}""")
# The next option after a secret option, which is not its value.
_NEXT_OPTION: Final = _pattern(r"--?|-[A-Za-z]|--[a-z][a-z0-9_.-]*(?:=[\s\S]*)?")
_LOGIN_OPTIONS: Final = frozenset(("-u", "--user", "-U", "--proxy-user"))
_LOGIN: Final = _pattern(
    r"""(?<!\S)(?:-u|-U|--user|--proxy-user)(?:\s{1,3}|=)["']?"""
    r"""[^\s:"'/]{1,256}:(?P<value>[^\s"']{1,1024})"""
)
_URL: Final = _pattern(
    r"[A-Za-z][A-Za-z0-9+.-]{1,20}://(?P<user>[^/\s:@]{0,256}):(?P<value>[^/\s@]{1,1024})@"
)
_URL_TOKEN: Final = _pattern(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://(?P<value>[^/\s:@]{20,1024})@")
_SAID: Final = _pattern(
    r"(?i)\b(?:password|passphrase|token|secret|key)\s{1,3}(?:is|was)\s{1,3}[\"']?"
    r"(?P<value>[^\s\"']{8,1024})"
)
_WANDB_LOGIN: Final = _pattern(
    r"\bwandb\s{1,3}login\s{1,3}(?:--\S{1,99}\s{1,3}){0,4}(?P<value>[0-9a-f]{40})\b"
)
# "Basic authentication" contains no secret.
_BEARER: Final = _pattern(
    r"\b(?i:bearer|basic)(?:\s+|%20)(?!(?-i:[A-Z]?[a-z-]+)(?![A-Za-z0-9+/._~=-]))"
    r"(?P<value>[A-Za-z0-9+/._~-]{12,4096}=*)"
)
# A header ends with its line. In a string of a program, the line may end with an escape.
_HEADER_NAMES: Final = r"(?:authorization|x-api-key|cookie|set-cookie):\s*"
_HEADER: Final = _pattern(
    rf"""(?im)^[^\n:"'\\]{{0,40}}\b{_HEADER_NAMES}(?P<value>[^\n]{{4,4096}})"""
)
_QUOTED_HEADER: Final = _pattern(
    rf"(?im)(?:(?:^|(?<=\\n))[^\n:]{{0,40}}\b|(?<=\\n)){_HEADER_NAMES}"
    r"""(?P<value>[^\n"'\\]{4,4096})"""
)
_PASS_OPTION: Final = _pattern(
    r"\b(?:sshpass\s{1,3}-p\s{0,3}|mysql[a-z]{0,9}\s(?:[^\n]{0,200}?\s)?-p"
    r"|(?:docker|podman)\s{1,3}login\s(?:[^\n]{0,200}?\s)?-p\s{0,3})"
    r"""["']?(?P<value>[^\s"']{1,1024})"""
)
# The signature of a URL that gives access to an object, until it expires. Elsewhere, a long one.
_SIGNED: Final = _pattern(
    r"(?i)(?<![A-Za-z0-9_])"
    r"(?:(?<=[?&])|(?<=[?&]x-amz-)|(?<=[?&]x-goog-)|(?=[a-z]{3,9}=[A-Za-z0-9%+/=_~.-]{16}))"
    r"sig(?:nature)?=(?P<value>[A-Za-z0-9%+/=_~.-]{6,4096})"
)
# Such a URL allows its reader to write to the channel.
_WEBHOOK: Final = _pattern(
    r"(?:hooks\.slack\.com/[a-z]{1,20}|discord(?:app)?\.com/api/webhooks"
    r"|webhook\.office\.com/webhookb2|api\.telegram\.org)/(?P<value>[A-Za-z0-9_/:@-]{16,1024})"
)
# A line of ~/.netrc, or several.
_NETRC: Final = _pattern(
    r"(?i)\blogin\s{1,3}\S{1,256}\s{1,3}(?:account\s{1,3}\S{1,256}\s{1,3})?password\s{1,3}"
    r"(?P<value>[^\s\"']{6,1024})"
)
# `auth=("ann", "…")` and `HTTPBasicAuth("ann", "…")`.
_LOGIN_PAIR: Final = _pattern(
    r"""(?i)auth\s{0,3}=?\s{0,3}\(\s{0,3}(?P<quote>["'])[^"'\n]{1,256}(?P=quote)\s{0,3},\s{0,3}"""
    r"""["'](?P<value>[^"'\n]{1,1024})"""
)
_KNOWN: Final = _pattern(
    r"(?<![A-Za-z0-9])(?P<value>"
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dapi[0-9a-f]{32}|dckr_pat_[\w-]{20,}"
    r"|wandb_v[0-9]_\w{20,}|xapp-[A-Za-z0-9-]{20,}|ya29\.[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|hv[bs]\.[\w-]{20,}|AGE-SECRET-KEY-[A-Z0-9]{20,}"
    r"|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|tskey-[\w-]{16,}|dop_v1_[0-9a-f]{40,}"
    r"|hold_[0-9a-f]{8}_[\w-]{43}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})"
)
_KEY_BEGIN: Final = _pattern(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END: Final = "-----END"
_KEY_CHARACTERS_MAX: Final = 16 * 1024
# The lines of a private key whose end is missing. Each may have the prefix of a log.
_KEY_LINES: Final = _pattern(
    r"(?:(?:\s|\\[rn]){0,8}(?:(?:Proc-Type|DEK-Info): ?[^\n]{1,200}|[A-Za-z0-9+/=]{16,}"
    r"|[^\n]{0,120}?[\s:\]|>][A-Za-z0-9+/=]{32,}(?=[\s\\\"']|\Z)"
    r"|[A-Za-z0-9+/=]{1,15}(?=[\s\\\"'.]|\Z)(?! [A-Za-z(])))*"
)
# A text without any of these contains no secret, except known values.
_ANY: Final = _pattern(
    r"[=:@ ]|\.com/|[a-z]_[A-Za-z0-9]|[a-z]-[A-Za-z0-9]|dapi|A[KS]IA|AIza|eyJ|ya29|SG|hv|AGE|>"
)
_NUMBER: Final = _pattern(r"[-+]?[0-9][0-9_.,]*(?:e[-+]?[0-9]+)?%?", re.IGNORECASE)
# A word of this length with a letter and a digit looks random.
RANDOM_CHARACTERS_MIN: Final = 8
_RANDOM_PART: Final = _pattern(
    rf"(?<![A-Za-z0-9+/=])(?=[A-Za-z0-9+/=]{{{RANDOM_CHARACTERS_MIN}}})"
    r"(?=[0-9+/=]*[A-Za-z])(?=[A-Za-z+/=]*[0-9])"
)
_BEFORE_PARAMETER: Final = frozenset("?&")
_OPENING: Final = frozenset("[{")
_QUOTES: Final = frozenset("\"'")
_ESCAPES: Final = frozenset("nrt")
# What is in every match of a pattern, in lower case or as it is. A test compares with the patterns.
_PREFIXES: Final = (
    *("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "xox"),
    *("AKIA", "ASIA", "AIza", "npm_", "pypi-", "dapi", "dckr_pat_", "hold_", "eyJ", "wandb_v"),
    *("xapp-", "ya29.", "sk_live_", "sk_test_", "rk_live_", "rk_test_", "SG.", "hvb.", "hvs."),
    *("AGE-SECRET-KEY-", "nvapi-", "gsk_", "tskey-", "dop_v1_"),
)
_SIGNATURES: Final = ("sig=", "signature=")
_WEBHOOKS: Final = (
    *("hooks.slack.com/", "discord.com/api/", "discordapp.com/api/", "webhook.office.com/"),
    "api.telegram.org/",
)
_PASS_PROGRAMS: Final = ("sshpass", "mysql", "docker", "podman")
_COLOUR: Final = _pattern(r"\x1b\[[0-9;]{0,20}m")
_HEADERS: Final = ("authorization:", "x-api-key:", "cookie:")
_LOGIN_PARTS: Final = ("-u", "-U", "--user", "--proxy-user")
# More than the characters of a line before its header.
HEADER_AFTER_MAX: Final = 64
_SAID_NAMES: Final = ("password", "passphrase", "token", "secret", "key")
# The longest of these names, and the spaces after it.
SAID_BEFORE_MAX: Final = 13
_NAME_PARTS: Final = (
    *("token", "pass", "secret", "key", "pw", "jwt", "dsn", "cred", "auth", "cookie"),
)
_VARIABLE_PARTS: Final = ("PAT", "AUTH")
_ODD_LETTERS: Final = str.maketrans({"\u0130": "i", "\u0131": "i", "\u017f": "s", "\u212a": "k"})
_NAME_CHARACTERS: Final = f"{string.ascii_letters}{string.digits}_.-"
# A name of at most 100 characters after two dashes, and the character before it.
NAME_CHARACTERS_MAX: Final = 103
# With more places than one in so many characters, a pattern in the whole text is faster.
PLACE_EVERY_CHARACTERS: Final = 16
_SCHEME_CHARACTERS: Final = f"{string.ascii_letters}{string.digits}+.-"
SCHEME_CHARACTERS_MAX: Final = 21
_NO_FIRST: Final = f"{string.digits}+.-"
# The characters between the beginning of a match of `_LISTED` and its name, with dashes.
_CALL: Final = (6, 5, 4, 3, 1)
_PUNCTUATION: Final = ",;(){}[]"
_REFERENCES: Final = frozenset(("from_file", "from_env", "prefect_secret"))


class _Name(IntEnum):
    """What the name of a value says about it."""

    PLAIN = 0
    PERHAPS_SECRET = 1
    PERHAPS_PASSWORD = 2
    SECRET = 3


@functools.lru_cache(maxsize=4096)
def _judge(name: str) -> _Name:
    plain = name.strip("-").rpartition(".")[2].replace("-", "_")
    words = _WORD.findall(plain)
    while words and words[-1].isdecimal():
        words.pop()
    low = "_".join(words).lower()
    if not words or plain in _NO_SECRET:
        return _Name.PLAIN
    variable = "_".join(words) if plain.isupper() else ""
    if _SECRET_NAME.fullmatch(low) or _SECRET_VARIABLE.fullmatch(variable):
        return _Name.SECRET
    if _PERHAPS_SECRET_VARIABLE.fullmatch(variable) and not _CHOICE_VARIABLE.fullmatch(variable):
        return _Name.PERHAPS_PASSWORD
    if _PERHAPS_SECRET_NAME.fullmatch(low) or _PERHAPS_SECRET_VARIABLE.fullmatch(variable):
        return _Name.PERHAPS_SECRET
    return _Name.PLAIN


def is_secret(name: str, value: str) -> bool:
    """Return True if the value of a key, a variable or an option with this name is a secret."""
    return _is_secret_of(_judge(name), value)


def _is_secret_of(judged: _Name, value: str) -> bool:
    if judged is _Name.PLAIN or judged is _Name.SECRET:
        return judged is _Name.SECRET
    return looks_random(value) or (judged is _Name.PERHAPS_PASSWORD and _is_password(value))


def secrets_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the secret values in a spec, longest first."""
    found = {value for _, value in _values_of(spec) if _is_long(value)}
    return tuple(sorted(found, key=len, reverse=True))


def places_of_secrets(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a spec whose values contain a secret, such as `environment.X`."""
    return tuple(dict.fromkeys(place for place, value in _values_of(spec) if _is_long(value)))


def _is_long(value: str) -> bool:
    """Return True for a value that is long enough to differ from other text."""
    return len(value) >= SECRET_CHARACTERS_MIN and not _NUMBER.fullmatch(value)


def redact(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Return the JSON value with its secrets hidden, by names of keys and options and in texts."""
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _is_hidden(_name_of(key, value), one) else redact(one, secrets)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            HIDDEN if is_option_value else redact(one, secrets)
            for one, is_option_value in _with_options(value)
        ]
    return value


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text, such as a traceback, with its secrets hidden."""
    parts, at = [], 0
    for start, end in spans(text, secrets):
        parts += [text[at:start], HIDDEN]
        at = end
    return "".join([*parts, text[at:]]) if parts else text


def mask_bytes(content: bytes, secrets: Sequence[str] = ()) -> bytes:
    """Return a part of a file with each byte of a secret as `*`. The length does not change."""
    # With one character per byte, positions in the text are positions in the file.
    text = content.decode("latin-1")
    masked = bytearray(content)
    spelled = [os.fsencode(secret).decode("latin-1") for secret in secrets]
    for start, end in spans(text, spelled):
        masked[start:end] = b"*" * (end - start)
    return bytes(masked)


def read_masked(file: BinaryIO, start: int, limit: int, secrets: Sequence[str] = ()) -> bytes:
    """Return `limit` bytes of a file from `start` with secrets masked.

    The surrounding bytes are read too, because the part may start or end inside a secret.
    """
    before = min(start, AROUND_BYTES)
    file.seek(start - before)
    content = mask_bytes(file.read(before + limit + AROUND_BYTES), secrets)
    return content[before : before + limit]


def spans(text: str, secrets: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return the (start, end) of each secret in `text`, in order and without overlaps."""
    colours = [match.span() for match in _COLOUR.finditer(text)] if "\x1b[" in text else []
    found = sorted(_find(text, secrets) if not colours else _find_below(text, colours, secrets))
    merged: list[tuple[int, int]] = []
    for start, end in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _find_below(
    text: str, colours: Sequence[tuple[int, int]], secrets: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Find the secrets of a text for a terminal, in which colours may be between any two words."""
    starts, parts, at, length = [0], [], 0, 0
    shifts = [0]
    for start, end in colours:
        parts.append(text[at:start])
        length += start - at
        starts.append(length)
        shifts.append(end - length)
        at = end
    for start, end in _find("".join([*parts, text[at:]]), secrets):
        first = shifts[bisect_right(starts, start) - 1]
        last = shifts[bisect_right(starts, end - 1) - 1]
        yield start + first, end + last


def _find(text: str, secrets: Sequence[str]) -> Iterator[tuple[int, int]]:
    for secret in secrets:
        at = text.find(secret)
        while at >= 0:
            yield at, at + len(secret)
            at = text.find(secret, at + len(secret))
    if not _ANY.search(text):
        return
    folded = _folded(text)
    headers = _places(folded, _HEADERS)
    # Not from the beginning of the text, which would take long in a text without lines.
    lines = sorted({text.rfind("\n", max(0, at - HEADER_AFTER_MAX), at) + 1 for at in headers})
    quoted = sorted({*lines, *(_after_escape(text, at) for at in headers)})
    schemes = [_scheme_at(text, at) for at in _places(text, ("://",))] if "@" in text else []
    for pattern, places in (
        (_KNOWN, _places(text, _PREFIXES)),
        (_BEARER, _places(folded, ("bearer", "basic"))),
        (_HEADER, lines),
        (_QUOTED_HEADER, quoted),
        (_PASS_OPTION, _places(text, _PASS_PROGRAMS)),
        (_WANDB_LOGIN, _places(text, ("wandb",))),
        (_SIGNED, _places(folded, _SIGNATURES)),
        (_WEBHOOK, _places(text, _WEBHOOKS)),
        (_NETRC, _places(folded, ("login",))),
        (_LOGIN_PAIR, _places(folded, ("auth",))),
        (_URL, schemes),
        (_URL_TOKEN, schemes),
    ):
        for match in _matches(pattern, text, places):
            yield match.span("value")
    yield from _find_keys(text)
    for match in _matches(_SAID, text, _said_places(folded)):
        if looks_random(match["value"]):
            yield match.span("value")
    for match in _matches(_LOGIN, text, _places(text, _LOGIN_PARTS)):
        # A numeric user and group is not a login with a password.
        if not _NUMBER.fullmatch(match["value"]):
            yield match.span("value")
    names = _names(text, folded)
    yield from _find_assigned(text, names)
    for match in _ELEMENT.finditer(text) if "</" in text else ():
        if _is_secret_of(_judge(match["name"]), match["value"]):
            yield match.span("value")
    yield from _find_listed(text, names)


def _after_escape(text: str, at: int) -> int:
    """Return where the last line before a place begins that an escape in a string separates."""
    before = text.rfind("\\n", max(0, at - HEADER_AFTER_MAX), at)
    return at if before < 0 else before + 2


def _folded(text: str) -> str:
    """Return `text` in lower case, with each character at its place."""
    if any(chr(one) in text for one in _ODD_LETTERS):
        # These match letters of ASCII if case is ignored, and lower case may be two characters.
        text = text.translate(_ODD_LETTERS)
    return text.lower()


def _places(text: str, words: Sequence[str]) -> list[int]:
    """Return where the words begin in `text`, in order.

    A search for a word is many times faster than a regular expression.
    """
    found = []
    for word in words:
        at = text.find(word)
        while at >= 0:
            found.append(at)
            at = text.find(word, at + 1)
    return sorted(found)


def _matches(
    pattern: re.Pattern[str], text: str, places: Sequence[int] | None
) -> Iterator[re.Match[str]]:
    """Yield the matches of `pattern.finditer(text)`. They begin at `places` only, unless None."""
    if places is None:
        yield from pattern.finditer(text)
        return
    end = 0
    for place in places:
        if place >= end and (match := pattern.match(text, place)):
            yield match
            end = match.end()


def _scheme_at(text: str, colon: int) -> int:
    """Return the first place where the scheme of a URL with this colon can begin."""
    near = text[max(0, colon - SCHEME_CHARACTERS_MAX) : colon]
    own = near[len(near.rstrip(_SCHEME_CHARACTERS)) :]
    return colon - len(own.lstrip(_NO_FIRST))


def _is_full(text: str, places: Sequence[int]) -> bool:
    """Return True for a text in which a look at each place would take long."""
    return len(places) * PLACE_EVERY_CHARACTERS > len(text)


def _said_places(folded: str) -> list[int]:
    """Return where a name begins that may be followed by "is" or "was", in order."""
    found = _places(folded, _SAID_NAMES)
    if not _is_full(folded, found):
        return found
    found = []
    for at in _places(folded, ("is", "was")):
        before = folded[max(0, at - SAID_BEFORE_MAX) : at].rstrip()
        end = max(0, at - SAID_BEFORE_MAX) + len(before)
        found += [end - len(name) for name in _SAID_NAMES if before.endswith(name)]
    return found


def _names(text: str, folded: str) -> list[int] | None:
    """Return the beginnings of words, with dashes, that may be the name of a secret, in order.

    Names and options are whole words, so that a pattern for them matches at a beginning only. None
    for a text that is full of them.
    """
    found = []
    end = 0
    places = sorted([*_places(folded, _NAME_PARTS), *_places(text, _VARIABLE_PARTS)])
    if _is_full(text, places):
        return None
    for at in places:
        if at < end:
            continue
        before = text[max(0, at - NAME_CHARACTERS_MAX) : at]
        start = at - len(before) + len(before.rstrip(_NAME_CHARACTERS))
        # A longer word is not a name.
        if start == 0 or start > at - NAME_CHARACTERS_MAX:
            is_escaped = text[max(0, start - 1) : start] == "\\" and text[start] in _ESCAPES
            found.append(start + is_escaped)
        after = text[at : at + NAME_CHARACTERS_MAX]
        end = at + len(after) - len(after.lstrip(_NAME_CHARACTERS))
    return found


def _find_keys(text: str) -> Iterator[tuple[int, int]]:
    """Find private keys in text form, including truncated ones."""
    until, end = 0, -1
    for match in _KEY_BEGIN.finditer(text):
        start = match.end()
        if start < until:
            continue
        if end < start:
            end = text.find(_KEY_END, start)
            end = len(text) + _KEY_CHARACTERS_MAX if end < 0 else end
        lines = _KEY_LINES.match(text, start, start + _KEY_CHARACTERS_MAX)
        until = end if end - start <= _KEY_CHARACTERS_MAX else lines.end() if lines else start
        if until > start:
            yield start, until


def _find_assigned(text: str, names: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Find the values that are assigned to secret names."""
    until = [0] * len(_Name)
    for match in _matches(_ASSIGNED, text, names):
        judged = _judge(match["name"])
        start, end = match.span()
        # Matches inside a value that was already checked are skipped, to save time.
        if judged is _Name.PLAIN or end < until[judged]:
            continue
        block = _BLOCK_VALUE.match(text, end)
        if block and judged is _Name.SECRET:
            yield block.span("value")
            until[judged] = block.end()
            continue
        pattern = _URL_VALUE if text[start - 1 : start] in _BEFORE_PARAMETER else _WORD_VALUE
        if text[end : end + 1] in _OPENING and not _EMPTY.match(text, end):
            pattern = _GROUP_VALUE
        span = _value_at(pattern, text, end)
        if span is None:
            continue
        value = text[slice(*span)]
        if _is_secret_of(judged, value) and not _is_spoken(match, value):
            yield span
            until[judged] = span[1]
        elif judged is not _Name.SECRET:
            until[judged] = span[1]


def _find_listed(text: str, names: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Find the values that follow secret names in a list, and those of options."""
    quoted = options = None
    for match in _matches(_SPACED, text, names):
        span = _value_at(_WORD_VALUE, text, match.end())
        if span and _judge(match["name"]) is _Name.SECRET and looks_random(text[slice(*span)]):
            yield span
    if names is not None:
        after_quote = [at for at in names if text[max(0, at - 1) : at] in _QUOTES]
        quoted = sorted(at - back for at in after_quote for back in _CALL if at >= back)
        options = [at for at in names if text[at] == "-"]
    paired = _matches(_PAIRED, text, names)
    listed = _matches(_LISTED, text, quoted)
    for match in itertools.chain(paired, listed, _matches(_OPTION, text, options)):
        judged = _judge(match["name"])
        if judged is _Name.PLAIN:
            continue
        span = _value_at(_WORD_VALUE, text, match.end())
        if span is None or _NEXT_OPTION.fullmatch(text, *span):
            continue
        if _is_secret_of(judged, text[slice(*span)]):
            yield span


def _value_at(pattern: re.Pattern[str], text: str, place: int) -> tuple[int, int] | None:
    """Return the (start, end) of the value at a place, without quotes."""
    found = pattern.match(text, place)
    if found is None:
        return None
    start, end = found.span()
    while text[start] == "\\" and start + 1 < end:
        start += 1
    if text[start] not in _QUOTES:
        return found.span()
    return start + 1, end - (text[end - 1] == text[start])


def _is_spoken(name: re.Match[str], value: str) -> bool:
    """Return True for output about a secret or a token, such as `loss per token: 2.31`."""
    value = value.strip(_PUNCTUATION)
    if value in {"", "None", "null", "True", "False", "true", "false"}:
        return True
    if ":" not in name["between"] or name["quote"]:
        return False
    # A plain number after `token` is a count. For other names, only short values are harmless.
    is_count = name["name"].lower().endswith("token") and bool(_NUMBER.fullmatch(value))
    return is_count or len(value) < SECRET_CHARACTERS_MIN


def looks_random(value: str) -> bool:
    """Return True for a text with a long word of letters and digits, which looks like a secret."""
    return len(value) >= RANDOM_CHARACTERS_MIN and _RANDOM_PART.search(value) is not None


def _is_password(value: str) -> bool:
    """Return True for a text with a long word that is none of the usual choices."""
    return any(match["word"].lower() not in _CHOICES for match in _LONG_WORD.finditer(value))


def _name_of(key: Any, table: Mapping[Any, Any]) -> str:
    """Return the name of a value, which may be beside it: `{"name": "X", "value": "…"}`."""
    beside = table.get("name", table.get("key")) if key == "value" else None
    return beside if isinstance(beside, str) else str(key)


def _is_hidden(name: str, value: Any) -> bool:
    """Return True for a value under a secret name that is, or contains, a text or a number."""
    return any(is_secret(name, leaf) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the values in JSON as texts, without empty values, booleans and references."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, Mapping):
        # A reference contains no secret.
        if not (len(value) == 1 and _REFERENCES.issuperset(value)):
            for one in value.values():
                yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


def _with_options(values: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each value, with True if it is the value of the secret option before it."""
    before = ""
    for value in values:
        text = str(value) if isinstance(value, str | int | float) else ""
        is_login = before in _LOGIN_OPTIONS and _is_login(text)
        is_taken = bool(text) and (
            is_login or (is_secret(before, text) and not _NEXT_OPTION.fullmatch(text))
        )
        yield value, is_taken
        is_option = isinstance(value, str) and value.startswith("-") and not is_taken
        before = value if is_option and "=" not in value else ""


def _is_login(value: str) -> bool:
    user, _, password = value.partition(":")
    return bool(user and password) and not _NUMBER.fullmatch(password)


def _values_of(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (place, value) for every secret value in JSON. The place is a dotted key."""
    if isinstance(value, str):
        for start, end in spans(value):
            yield place, value[start:end]
    elif isinstance(value, Mapping):
        for key, one in value.items():
            here = f"{place}.{key}" if place else str(key)
            if _is_hidden(_name_of(key, value), one):
                yield from ((here, leaf) for leaf in _leaves(one))
            else:
                yield from _values_of(one, here)
    elif isinstance(value, list | tuple):
        for one, is_option_value in _with_options(value):
            yield from ((place, str(one)),) if is_option_value else _values_of(one, place)
