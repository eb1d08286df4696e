"""The version of Holdfast. Only `pyproject.toml` has it in writing."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Final

from holdfast.contracts.errors import PreflightError

DISTRIBUTION: Final = "holdfast"


@cache
def holdfast_version() -> str:
    """Return the version of the installed distribution.

    Raises `PackageNotFoundError` if Holdfast is on the path without being installed.
    """
    # Only for the version: it takes longer to import than many commands need for their work.
    from importlib.metadata import version

    return version(DISTRIBUTION)


# The distribution holdfast-bench, which some commands need and no run does.
BENCH: Final = "holdfast_bench"


def require_bench_package(what: str) -> None:
    """Raise `PreflightError` if `what` was asked for without holdfast-bench."""
    if find_spec(BENCH) is None:
        raise PreflightError(
            f"{what} needs the package holdfast-bench, which is not installed in this environment. "
            f"Run `pip install ./benchmarks` in a checkout of Holdfast {holdfast_version()}."
        )
