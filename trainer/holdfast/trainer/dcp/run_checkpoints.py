"""A run's record of checkpoints that its program placed by `dcp.save`.

Each has a directory in the run's folder with nothing but a manifest, and the manifest names the
program's directory. So the index, `holdfast checkpoints`, `lineage` and `verify` know them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.disk.sources import GONE, REPLACED, record_source, retire_source
from holdfast.contracts.errors import HoldfastError

# So many directories are looked at after each save. Programs keep few, and delete the oldest.
LOOKS: Final = 8


@dataclass(frozen=True)
class Placed:
    """One record. `contents` is the checksum of the manifest's table of files."""

    id: str
    name: str
    directory: Path
    contents: str
    committed_at: float

    @classmethod
    def of(cls, manifest: Manifest) -> Placed:
        return cls(
            manifest.id,
            manifest.name,
            Path(manifest.source or ""),
            manifest.checksum,
            manifest.committed_at,
        )


class RunCheckpoints:
    """The placed checkpoints of a run that still exist. Not safe for use by several threads."""

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        # The first ones are looked at next.
        self._known = deque(_read_all(run))

    def find(self, manifest: Manifest) -> Placed | None:
        """Return the newest record with these contents, also if its directory was renamed."""
        contents = manifest.checksum
        same = [one for one in self._known if one.contents == contents]
        return max(same, key=lambda one: one.committed_at, default=None)

    def add(
        self, directory: Path, manifest: Manifest, name: CheckpointName, parent: str | None
    ) -> Placed:
        """Record the checkpoint in `directory`, which has `manifest`, under `name`.

        `parent` is the id of the checkpoint before it. Raises `OSError` if storage fails, and
        `ValueError` if the run has another checkpoint of this name, or if a manifest cannot name
        the directory.
        """
        here = {
            "name": str(name),
            "step": name.step,
            "source": str(directory),
            "parent": parent,
            "is_placed": False,
        }
        recorded = Manifest.model_validate(manifest.model_dump() | here)
        if not record_source(self._run, recorded):
            raise ValueError(f"the run has another checkpoint {name}")
        added = Placed.of(recorded)
        self._known.append(added)
        return added

    def retire_lost(self, newest: Placed) -> Iterator[tuple[Placed, str]]:
        """Yield each record whose files are gone or were replaced, and why, then retire it.

        `newest` was just recorded. Only `LOOKS` directories are looked at, in turn. Raises
        `OSError` if storage fails.
        """
        lost = [
            (one, REPLACED)
            for one in self._known
            if one.directory == newest.directory and one != newest
        ]
        for _ in range(min(LOOKS, len(self._known))):
            one = self._known[0]
            self._known.rotate(-1)
            if (one, REPLACED) not in lost and _is_gone(one.directory):
                lost.append((one, GONE))
        for one, why in lost:
            yield one, why
            retire_source(self._run, one.name)
            self._known.remove(one)


def _read_all(run: RunPaths) -> Iterator[Placed]:
    """Yield what can be read. Storage that fails here must not end the program."""
    with contextlib.suppress(OSError, HoldfastError):
        for directory in run.list_checkpoints():
            with contextlib.suppress(OSError, HoldfastError):
                manifest = read_manifest(directory)
                if manifest is not None and manifest.source is not None:
                    yield Placed.of(manifest)


def _is_gone(directory: Path) -> bool:
    # Without the folder above, the file system may be away, which proves nothing.
    return not (directory / MANIFEST).exists() and directory.parent.is_dir()
