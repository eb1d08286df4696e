"""Sections of a recorded spec that is plain data, which another version or a person wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(spec: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the section under `names`, each inside the one before; empty if it is no table."""
    found: Any = spec
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
