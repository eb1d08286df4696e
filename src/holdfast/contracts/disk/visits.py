"""Work on many runs' folders, of which some cannot be read.

A root may be shared, so any folder in it may be damaged, of another version, or hostile. Commands,
flows and services that work on several runs do that by `visit`, so no folder's error ends the work
on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from holdfast.contracts.disk.paths import RunPaths, list_runs
from holdfast.contracts.errors import HoldfastError

T = TypeVar("T")


@dataclass(frozen=True)
class Visit(Generic[T]):
    """What the work on one run returned, or why it failed."""

    paths: RunPaths
    result: T | None = None
    error: Exception | None = None

    @property
    def reason(self) -> str:
        """Why the work failed, as text; '' if it did not."""
        if self.error is None:
            return ""
        if isinstance(self.error, HoldfastError | OSError):
            return str(self.error)
        return f"{type(self.error).__name__}: {self.error}"


def visit(
    runs: Iterable[RunPaths],
    work: Callable[[RunPaths], T],
    *,
    raises: tuple[type[Exception], ...] = (),
) -> Iterator[Visit[T]]:
    """Do `work` on each run and yield its outcome.

    Only exceptions of the types `raises` end the loop: those that concern all runs, such as a
    database that cannot be used.
    """
    for paths in runs:
        try:
            result = work(paths)
        except raises:
            raise
        # Any file of the folder may be anything, and other runs follow.
        except Exception as error:
            yield Visit(paths, error=error)
        else:
            yield Visit(paths, result)


def own_runs(root: Path) -> list[RunPaths]:
    """Return this user's runs in `root`, by name: folder and spec are this user's or root's."""
    return [one.paths for one in visit(list_runs(root), RunPaths.is_mine) if one.result]
