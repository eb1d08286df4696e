"""A run's record of checkpoints that its program placed by `dcp.save`.

Each has a directory in the run's folder with nothing but a manifest, and the manifest names the
program's directory. So the index, `holdfast checkpoints`, `lineage` and `verify` know them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.sources import GONE, REPLACED, record_source, retire_source


@dataclass(frozen=True)
class Placed:
    """One record. `contents` is the checksum of the manifest's table of files."""

    id: str
    name: str
    directory: Path
    contents: str

    @classmethod
    def of(cls, manifest: Manifest) -> Placed:
        return cls(manifest.id, manifest.name, Path(manifest.source or ""), manifest.checksum)


class RunCheckpoints:
    """The placed checkpoints of a run that still exist. Not safe for use by several threads."""

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        self._known = list(_read_all(run))

    def find(self, manifest: Manifest) -> Placed | None:
        """Return the newest record with these contents, also if its directory was renamed."""
        contents = manifest.checksum
        return next((one for one in reversed(self._known) if one.contents == contents), None)

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
        self._known.append(Placed.of(recorded))
        return self._known[-1]

    def retire_lost(self, newest: Placed) -> Iterator[tuple[Placed, str]]:
        """Yield each record whose files are gone or were replaced, and why, then retire it.

        `newest` was just recorded. Raises `OSError` if storage fails.
        """
        for one in self._known[:]:
            why = _why_lost(one, newest)
            if why:
                yield one, why
                retire_source(self._run, one.name)
                self._known.remove(one)


def _read_all(run: RunPaths) -> Iterator[Placed]:
    for directory in run.list_checkpoints():
        with contextlib.suppress(DamagedCheckpointError, OSError):
            manifest = read_manifest(directory)
            if manifest is not None and manifest.source is not None:
                yield Placed.of(manifest)


def _why_lost(one: Placed, newest: Placed) -> str:
    if one.directory == newest.directory:
        return REPLACED if one != newest else ""
    # Without the folder above, the file system may be away, which proves nothing.
    is_there = (one.directory / MANIFEST).exists() or not one.directory.parent.is_dir()
    return "" if is_there else GONE
