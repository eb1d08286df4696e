"""Where a step was trained: one launch of one attempt."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.contracts.disk.journal import Event


@dataclass(frozen=True, order=True)
class LaunchPlace:
    """One launch of one attempt."""

    attempt: int
    launch: int

    def __str__(self) -> str:
        return f"a{self.attempt:04d}.l{self.launch:02d}"


def place_of(event: Event) -> LaunchPlace:
    """Return the launch of a journal line, with zeros for missing values."""
    return LaunchPlace(int(event.data.get("attempt", 0)), int(event.data.get("launch", 0)))
