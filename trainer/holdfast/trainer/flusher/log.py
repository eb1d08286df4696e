"""The flusher's log, which is its standard error."""

from __future__ import annotations

from holdfast.contracts.node.reporting import report


def log(text: str) -> None:
    """Write a line to the log."""
    report(f"holdfast flusher: {text}", is_error=True)
