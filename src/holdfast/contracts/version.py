"""The version of Holdfast. Only `pyproject.toml` has it in writing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Final

DISTRIBUTION: Final = "holdfast"


@cache
def holdfast_version() -> str:
    """Return the version of the installed distribution.

    Raises `PackageNotFoundError` if Holdfast is on the path without being installed.
    """
    return version(DISTRIBUTION)
