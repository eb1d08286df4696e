"""Values that look like secrets, taken out of what the API tells.

A spec may hold a token in its environment or in a URL; whoever may read the page need not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "•••"
SECRET_CHARACTERS_MIN: Final = 6
_NAME = re.compile(
    r"(?i)(secret|token|password|passwd|credential|private|api_?key|access_?key|_key$)"
)
_URL = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*):(?P<secret>[^/\s@]+)@")
_OPTION = re.compile(
    r"(?i)(?P<name>--?[a-z0-9_-]*(?:secret|token|password|api[_-]?key)[a-z0-9_-]*[= ])\S+"
)


def is_secret(name: str) -> bool:
    """True for a name whose value is nobody's business."""
    return bool(_NAME.search(name))


def secrets_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The values in a spec's environment that may not be shown, longest first."""
    environment = spec.get("environment") or {}
    found = {
        str(value)
        for name, value in environment.items()
        if is_secret(name) and len(str(value)) >= SECRET_CHARACTERS_MIN
    }
    return tuple(sorted(found, key=len, reverse=True))


def redact(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """`value` of JSON, with secret values, passwords in URLs and secret options hidden."""
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(one, str) and one and is_secret(str(key))
            else redact(one, secrets)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(one, secrets) for one in value]
    return value


def redact_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """The same for a text, such as a traceback or a log."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _URL.sub(rf"\g<before>:{HIDDEN}@", text)
    return _OPTION.sub(rf"\g<name>{HIDDEN}", text) if "-" in text else text
