"""The folders that a program names in `save_state`. Each links to a checkpoint of the run.

A link is a file `holdfast.json` with the checkpoint's id and directory. The journal says that the
folder exists, as for an export, so no keep rule deletes its checkpoint before the folder is gone.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.filesystems import is_there
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import CheckpointError, NotFoundError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.loading.checkpoint import find_directory

LINK: Final = "holdfast.json"
FORMAT: Final = 1
NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
# Every checkpoint of Accelerate itself has such a file, whatever is trained.
STOCK: Final = "random_states_*.pkl"


@dataclass(frozen=True)
class FolderLink:
    """The content of a folder's link: a checkpoint's id, and where it was when it was written."""

    checkpoint: str
    directory: Path


class Folders:
    """Writes the links of one run, on rank 0, and applies `total_limit`."""

    def __init__(self, configuration: Any, *, is_main: bool) -> None:
        self._configuration, self._is_main = configuration, is_main
        self._wanted: list[Path] = []
        # A folder of numbered ones, and the checkpoint whose commit allows to delete older ones.
        self._to_limit: tuple[Path, Path] | None = None

    def for_save(self, output_dir: str | Path | None, run: str) -> Path:
        """Return the folder of a save. Raises `SpecError` if it belongs to something else."""
        if not self._configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise SpecError(
                    "save_state without output_dir: expected a folder, or a ProjectConfiguration "
                    "with automatic_checkpoint_naming=True"
                )
            return Path(output_dir).expanduser().absolute()
        folder = (
            numbered_folder(self._configuration) / f"checkpoint_{self._configuration.iteration}"
        )
        link = read_link(folder)
        is_ours = link is not None and link.checkpoint.rpartition(":")[0] == run
        if self._is_main and folder.exists() and any(folder.iterdir()) and not is_ours:
            raise SpecError(
                f"{folder} already exists and is not a save of run {run}; use another project_dir, "
                "or set project_configuration.iteration to a number that is free"
            )
        return folder

    def want(self, folder: Path) -> None:
        """Link `folder` to the next checkpoint."""
        if self._is_main:
            make_directory(folder)
        self._wanted.append(folder)

    def look(self, session: FrameworkSession) -> None:
        """Write links to the current step's checkpoint, and delete folders beyond the limit."""
        checkpoint = session.current_checkpoint
        if self._wanted and checkpoint is not None:
            wanted, self._wanted = self._wanted, []
            if self._is_main:
                for folder in wanted:
                    self._link(session, checkpoint, folder)
        if self._to_limit is not None and is_there(self._to_limit[1] / MANIFEST):
            delete_oldest(self._to_limit[0], self._configuration.total_limit)
            self._to_limit = None

    def _link(self, session: FrameworkSession, checkpoint: str, folder: Path) -> None:
        name = checkpoint.rpartition(":")[2]
        directory = RunPaths(session.run_directory).checkpoint(name)
        content = {"format": FORMAT, "checkpoint": checkpoint, "directory": str(directory)}
        write_bytes(folder / LINK, to_json(content))
        session.keep_while_there(checkpoint, folder)
        configuration = self._configuration
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            self._to_limit = folder.parent, directory


def numbered_folder(configuration: Any) -> Path:
    return Path(configuration.project_dir).expanduser().absolute() / "checkpoints"


def newest_folder(configuration: Any) -> Path | None:
    found = numbered(numbered_folder(configuration))
    return found[-1] if found else None


def numbered(parent: Path) -> list[Path]:
    """Return the folders `checkpoint_<n>` in `parent`, by number."""
    names = [name.name for name in parent.iterdir()] if parent.is_dir() else []
    matches = [match for match in map(NUMBERED.fullmatch, names) if match]
    return [parent / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def delete_oldest(parent: Path, limit: int) -> None:
    """Delete the numbered folders with the lowest numbers until `limit` are left, at least one.

    A checkpoint that was linked is then deleted only if the run's keep rules allow it.
    """
    found = numbered(parent)
    for folder in found[: max(0, len(found) - max(limit, 1))]:
        shutil.rmtree(folder, ignore_errors=True)


def read_link(folder: Path) -> FolderLink | None:
    """Return the link in `folder`, or None without one. Raises `CheckpointError` if unreadable."""
    path = folder / LINK
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']!r}; this version of Holdfast reads {FORMAT}"
            )
        return FolderLink(content["checkpoint"], Path(content["directory"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a link to a checkpoint: {error}; load another folder"
        ) from error


def find_linked(link: FolderLink, folder: Path) -> Path:
    """Return the directory of a linked checkpoint. Raises `CheckpointError` if it is not there."""
    try:
        directory = find_directory(link.directory)
    except NotFoundError:
        try:
            directory = find_directory(link.checkpoint)
        except NotFoundError as error:
            raise CheckpointError(f"{folder} links to {link.checkpoint}, but {error}") from error
    if not is_there(directory / MANIFEST):
        raise CheckpointError(
            f"{folder} links to {link.checkpoint}, which was never committed: its launch ended "
            "before. Load another folder"
        )
    return directory


def require_stock(folder: Path | None) -> Path:
    """Return `folder` if it is a checkpoint of Accelerate. Raises `CheckpointError` otherwise."""
    if folder is None or not folder.is_dir():
        raise CheckpointError(
            f"load_state: {folder or 'the project'} has no checkpoint; expected a folder that "
            "save_state wrote"
        )
    if not any(folder.glob(STOCK)):
        raise CheckpointError(
            f"{folder}: neither a save of Holdfast ({LINK}) nor one of Accelerate ({STOCK}); "
            "expected a folder that save_state wrote. A checkpoint of another framework cannot be "
            "continued here"
        )
    return folder


def report_ignored(folder: Path | None, session: FrameworkSession, *, is_main: bool) -> None:
    """Report that a run that already has a checkpoint does not load `folder`."""
    if is_main:
        report(
            f"holdfast: load_state({str(folder) if folder else ''!r}) is left out: the run "
            f"continues from its own checkpoint {session.resumed_from}, after step {session.step}"
        )
