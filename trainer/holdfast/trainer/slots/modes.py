"""Where a rank stages its steps: two images in memory, one in memory, or two on the node's disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts import environment
from holdfast.contracts.disk.filesystems import NODE_LOCAL, filesystem_of
from holdfast.contracts.errors import SaveError, SpecError
from holdfast.trainer.slots.slots import SLOTS_PER_RANK

KEY: Final = "checkpoint.staging"
DIRECTORY_KEY: Final = "checkpoint.staging_directory"
IN_MEMORY: Final = "memory"
SINGLE: Final = "single"
ON_DISK: Final = "disk"
MODES: Final = (IN_MEMORY, SINGLE, ON_DISK)
# Of a job first. Clusters often make it for each job, on the node's own disk.
PLACES: Final = ("/tmp", "/var/tmp")


@dataclass(frozen=True)
class Staging:
    """The value of `checkpoint.staging`, and the directory for the images of `disk`.

    An empty directory means the first of `$TMPDIR`, `/tmp` and `/var/tmp` on a disk of this node.
    """

    mode: str = IN_MEMORY
    directory: str = ""

    @classmethod
    def parse(cls, mode: object, directory: str = "") -> Staging:
        """Return the staging with these values. Raises `SpecError`."""
        if mode not in MODES:
            raise SpecError(f"{KEY} {mode!r}: expected 'memory', 'single' or 'disk'")
        if directory and not directory.startswith("/"):
            raise SpecError(
                f"{environment.STAGING_DIRECTORY}={directory!r}: expected an absolute path"
            )
        return cls(str(mode), directory)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Staging:
        """Return the staging that the environment variables set. Raises `SpecError`."""
        mode = variables.get(environment.CHECKPOINT_STAGING) or IN_MEMORY
        return cls.parse(mode, variables.get(environment.STAGING_DIRECTORY, ""))

    @property
    def slots(self) -> int:
        """The number of images that a rank has."""
        return 1 if self.mode == SINGLE else SLOTS_PER_RANK

    @property
    def is_on_disk(self) -> bool:
        return self.mode == ON_DISK

    def find_directory(self) -> str:
        """Return the directory for the images, "" if they are in memory.

        Raises `SaveError` if no directory, or not the one that was named, is on a disk of the node.
        """
        if not self.is_on_disk:
            return ""
        if self.directory:
            if problem := _problem_with(Path(self.directory)):
                raise SaveError(
                    f"{DIRECTORY_KEY} {self.directory!r} {problem}. Name a directory on a disk of "
                    f"each node, or set {KEY} = 'single'"
                )
            return self.directory
        found = default_directory()
        if found is None:
            tried = ", ".join(f"{place} {_problem_with(Path(place))}" for place in _places())
            raise SaveError(
                f"{KEY} = 'disk' has no directory: {tried}. Set {DIRECTORY_KEY} to a directory on "
                f"a disk of each node, or {KEY} = 'single'"
            )
        return found


MEMORY: Final = Staging()


def default_directory() -> str | None:
    """Return the directory of `disk` where none was named, or None if none is on a disk."""
    return next((place for place in _places() if not _problem_with(Path(place))), None)


def _places() -> list[str]:
    own = os.environ.get("TMPDIR", "")
    return [*([own] if own.startswith("/") else []), *PLACES]


def _problem_with(directory: Path) -> str:
    """Return why images cannot lie in a directory, "" if they can."""
    if not directory.is_dir():
        return "is not a directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "is not writable"
    mounted = filesystem_of(directory)
    if mounted.kind in NODE_LOCAL:
        return f"is in memory ({mounted.kind}), so images there would need as much of it"
    if mounted.is_network:
        return f"is on {mounted.kind}, which is not a disk of this node"
    return ""
