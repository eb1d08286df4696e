"""The distribution holdfast-bench, which some commands need and no run does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from holdfast.contracts.errors import PreflightError
from holdfast.contracts.version import holdfast_version

NAME: Final = "holdfast_bench"


def require_bench_package(what: str) -> None:
    """Raise `PreflightError` if `what` was asked for without the distribution."""
    if find_spec(NAME) is None:
        raise PreflightError(
            f"{what} needs the package holdfast-bench, which is not installed in this environment. "
            f"Run `pip install ./benchmarks` in a checkout of Holdfast {holdfast_version()}."
        )
