"""Copy a program's code into its run: what `launch.code = "snapshot"` copies, and what it does not.

Under git these are the files that git tracks or does not ignore, with those of submodules.
Elsewhere they are all files except caches. A link to a folder inside becomes a copy of that folder.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, paths
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs.provenance import ask_git, is_open_here

GIT_TIMEOUT_S: Final = 60.0
CODE_BYTES_MAX: Final = 512 * 1024 * 1024
NAMES_SHOWN: Final = 5
_NOT_CODE: Final = frozenset(
    {".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    | {"node_modules", ".tox", ".eggs"}
)


@dataclass
class CodeFiles:
    """The files of a snapshot by their names in it, and what a reader of it should know."""

    files: dict[Path, Path] = field(default_factory=dict)
    # Links to folders that are not copied. The snapshot has links to the same folders.
    links: dict[Path, Path] = field(default_factory=dict)
    unadded: list[str] = field(default_factory=list)
    # Submodules without files, and links to nothing.
    absent: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What `submit` says about the snapshot."""
        links = [f"{name} → {target}" for name, target in self.links.items()]
        texts = {
            "the copy contains files that git does not track; add those to .gitignore that the "
            "program does not need": self.unadded,
            "the copy links to folders that it does not contain, so the program sees later "
            "changes there": links,
            "the copy lacks submodules that are not checked out (run `git submodule update "
            "--init`) and links to nothing": self.absent,
        }
        return [
            f"launch.code = 'snapshot': {text}: {_listing(names)}"
            for text, names in texts.items()
            if names
        ]


def snapshot_warnings(spec: RunSpec) -> list[str]:
    """Return what a user should know about the snapshot that a run of `spec` makes; or []."""
    if spec.launch.code != "snapshot":
        return []
    return find_code(Path(spec.launch.working_directory)).warnings


def find_code(source: Path) -> CodeFiles:
    """Return the files of a snapshot of `source`.

    Raises `PreflightError` if they are larger than `CODE_BYTES_MAX`.
    """
    found, links = CodeFiles(), list[Path]()
    _collect(source, Path(), found, links)
    inside = dict(found.files)
    for name in links:
        _follow(source, name, found, inside)
    sizes = {name: path.stat().st_size for name, path in found.files.items()}
    if (total := sum(sizes.values())) > CODE_BYTES_MAX:
        largest = sorted(sizes, key=lambda name: -sizes[name])
        raise PreflightError(
            f"launch.code = 'snapshot': {source} holds {total} bytes, expected at most "
            f"{CODE_BYTES_MAX}; the largest files are {_listing(map(str, largest))}. Add what is "
            "no code to .gitignore, or use 'in_place', or a working directory that holds only code"
        )
    return found


def copy_code(found: CodeFiles, target: Path) -> None:
    """Make the snapshot `target`. What an interrupted copy has left there is deleted.

    The caller makes sure that nobody else copies to `target`.
    """
    for old in (target, *target.parent.glob(f".{target.name}.*")):
        shutil.rmtree(old, ignore_errors=True)
    # Under a temporary name, so a snapshot is complete or absent.
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir()
        for name, path in found.files.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, unfinished / name)
        for name, folder in found.links.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / name).symlink_to(folder)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    durable.fsync_directory(target.parent)


def _collect(source: Path, prefix: Path, found: CodeFiles, links: list[Path]) -> None:
    """Add the files below `source / prefix` to `found`, and links to folders to `links`."""
    tracked = _names_by_git(source / prefix, "--cached")
    others = _names_by_git(source / prefix, "--others", "--exclude-standard")
    is_git = bool(tracked or others) and tracked is not None and others is not None
    names = [*(tracked or ()), *(others or ())] if is_git else _walk(source / prefix)
    unadded = frozenset(others or ()) if is_git and tracked else frozenset[str]()
    skipped = _Skipped(source)
    for text in dict.fromkeys(names):
        name, path = prefix / text, source / prefix / text
        if skipped.has(path):
            continue
        if path.is_symlink() and path.is_dir():
            links.append(name)
        elif path.is_dir():
            # A submodule, or a repository inside this one.
            if (path / ".git").exists():
                _collect(source, name, found, links)
            else:
                found.absent.append(str(name))
        elif path.is_file():
            # Closing a file that SQLite has open would release its locks, see decision 20.
            if is_open_here(path):
                continue
            found.files[name] = path
            if text in unadded:
                found.unadded.append(str(name))
        elif path.is_symlink():
            found.absent.append(str(name))


def _follow(source: Path, name: Path, found: CodeFiles, inside: dict[Path, Path]) -> None:
    """Add what a link to a folder shows: files that are in the snapshot, or else the link."""
    target = Path(os.path.realpath(source / name))
    folder, root = Path(os.path.realpath((source / name).parent)), Path(os.path.realpath(source))
    members: dict[Path, Path] = {}
    # A link to a folder that contains the link would contain itself.
    if target.is_relative_to(root) and not folder.is_relative_to(target):
        below = target.relative_to(root)
        members = {
            name / each.relative_to(below): path
            for each, path in inside.items()
            if each.is_relative_to(below)
        }
    if members:
        found.files.update(members)
    else:
        found.links[name] = target


class _Skipped:
    """Folders that are not code: those of runs, and Holdfast's own."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._known: dict[Path, bool] = {source: False}

    def has(self, path: Path) -> bool:
        """Return True if `path` is in such a folder below the source."""
        folder = path.parent
        if folder not in self._known:
            is_ours = (folder / paths.ROOT_ID).exists() or folder == paths.holdfast_home()
            self._known[folder] = is_ours or self.has(folder)
        return self._known[folder]


def _walk(folder: Path) -> Iterator[str]:
    """Return the files under a folder without git, and its links to folders, except caches."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_CODE)
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in sorted([*files, *linked]):
            yield os.path.relpath(os.path.join(place, name), folder)


def _names_by_git(folder: Path, *which: str) -> list[str] | None:
    """Return names that git lists in a folder; None if git cannot."""
    listing = ask_git(folder, "ls-files", "-z", *which, timeout_s=GIT_TIMEOUT_S)
    if listing is None:
        return None
    return [os.fsdecode(name).rstrip("/") for name in listing.split(b"\0") if name]


def _listing(names: Iterable[str]) -> str:
    """Return the first names, and how many there are more."""
    every = list(names)
    more = len(every) - NAMES_SHOWN
    return ", ".join(every[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
