"""The processes of a run, their launches, and the orphans among them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.disk.journal import Event
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import ATTEMPT, LAUNCH, RUN_DIRECTORY

# The flusher of a killed agent first commits the sealed steps.
ORPHAN_S: Final = 20.0
POLL_S: Final = 0.2
_OURS: Final = ("holdfast.", "holdfast_bench.", "submitit.")


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


@dataclass(frozen=True)
class Marked:
    """A live process of the run. `place` is the launch that started it, if any."""

    process: psutil.Process
    text: str
    place: LaunchPlace | None


def marked_processes(paths: RunPaths) -> list[Marked]:
    """Return every live process of the run, found by its environment or its arguments.

    The arguments count if they contain a module of Holdfast or submitit and the run's folder.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            argv, variables = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        folder = str(paths.directory)
        is_rank = variables.get(RUN_DIRECTORY) == folder
        is_ours = any(_is_inside(argument, folder) for argument in argv) and any(
            argument.startswith(_OURS) for argument in argv
        )
        if is_rank or is_ours:
            numbers = variables.get(ATTEMPT), variables.get(LAUNCH)
            place = LaunchPlace(int(numbers[0] or 0), int(numbers[1] or 0)) if is_rank else None
            program, *arguments = argv or ["?"]
            text = " ".join([Path(program).name, *arguments]).replace(folder, paths.name)
            found.append(Marked(process, f"{process.pid} ({text[:120]})", place))
    return found


def orphans(
    paths: RunPaths, owners: Iterable[psutil.Process], current: LaunchPlace | None
) -> list[str]:
    """Return the run's processes that still exist after `ORPHAN_S` seconds and have no owner.

    The `owners` and their descendants are not orphans, unless they belong to an older launch than
    `current`. A warm standby belongs to a newer one.
    """
    roots = list(owners)
    give_up = time.monotonic() + ORPHAN_S
    while True:
        found = _strays(paths, roots, current)
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(POLL_S)


def _strays(
    paths: RunPaths, owners: list[psutil.Process], current: LaunchPlace | None
) -> list[str]:
    owned: set[int] = set()
    for owner in owners:
        try:
            owned |= {owner.pid, *(p.pid for p in owner.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return [
        one.text
        for one in marked_processes(paths)
        if one.process.is_running()
        and (one.process.pid not in owned or _is_older(one.place, current))
    ]


def _is_older(place: LaunchPlace | None, current: LaunchPlace | None) -> bool:
    return place is not None and current is not None and place < current


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
