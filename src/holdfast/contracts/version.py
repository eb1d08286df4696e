"""The version of Holdfast. Only `pyproject.toml` has it in writing."""

from __future__ import annotations

from functools import cache
from typing import Final

DISTRIBUTION: Final = "holdfast"


@cache
def holdfast_version() -> str:
    """Return the version of the installed distribution.

    Raises `PackageNotFoundError` if Holdfast is on the path without being installed.
    """
    # Only for the version: it takes longer to import than many commands need for their work.
    from importlib.metadata import version

    return version(DISTRIBUTION)
