"""The manifest: written last, it is what makes a directory of files a checkpoint.

A checkpoint is committed exactly when its manifest is durable under its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from holdfast.contracts.digests import document_digest, file_checksum
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.paths import MANIFEST, CheckpointName

FORMAT = 1


class FileEntry(BaseModel):
    """One file of a checkpoint; `path` is relative to its directory, with forward slashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    bytes: Annotated[int, Field(ge=0)]
    checksum: str

    @field_validator("path")
    @classmethod
    def _path_stays_inside(cls, value: str) -> str:
        parts = value.split("/")
        if not value or value.startswith("/") or "\\" in value or {"", ".", ".."} & set(parts):
            raise ValueError(f"{value!r}: expected a relative path inside the checkpoint")
        return value


class Manifest(BaseModel):
    """The commit record of one checkpoint. Times are Unix seconds, durations seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    run_uid: str
    run: str
    name: str = Field(description="the checkpoint's directory name")
    step: Annotated[int, Field(ge=0)]
    attempt: int
    incarnation: int
    world_size: Annotated[int, Field(ge=1)]
    parent: str | None = Field(
        default=None, description="id of the checkpoint that this state grew from, `run:directory`"
    )
    reason: str = Field(default="interval", description="interval, final, crash or request")
    command_digest: str = ""
    checksum_algorithm: Literal["xxh3_128"] = "xxh3_128"
    files: tuple[FileEntry, ...]
    blocked_s: float = Field(default=0.0, description="seconds that the slowest rank was held")
    flush_s: float = Field(default=0.0, description="seconds from the seal to the last data fsync")
    staged_at: float = 0.0
    committed_at: float
    versions: dict[str, str] = Field(default_factory=dict)
    topology: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(
        default_factory=dict, description="finite ones only: JSON has no others"
    )

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics_are_finite(cls, value: Any) -> Any:
        # A loss of NaN must not make the commit record of a good checkpoint unreadable.
        if not isinstance(value, dict):
            return value
        return {
            name: number
            for name, number in value.items()
            if number is not None and not (isinstance(number, float) and not isfinite(number))
        }

    @property
    def id(self) -> str:
        """The checkpoint's name for people and the API."""
        return f"{self.run}:{self.name}"

    @property
    def bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(entry.bytes for entry in self.files)

    @property
    def checksum(self) -> str:
        """One SHA-256 over the file table: equal checksums mean equal contents."""
        return document_digest(sorted((e.path, e.bytes, e.checksum) for e in self.files))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`, or None when the checkpoint was never committed.

    Raises `DamagedCheckpointError` when there is one that cannot be believed: not JSON, of
    another format, or of another checkpoint than the directory's name says.
    """
    path = directory / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise DamagedCheckpointError(
            f"{path}: not a manifest of format {FORMAT}: {where}: {first['msg']}",
            damaged=[f"{MANIFEST}: {where}: {first['msg']}"],
        ) from error
    name = CheckpointName(manifest.step, manifest.attempt, manifest.incarnation)
    if not directory.name == manifest.name == str(name):
        raise DamagedCheckpointError(
            f"{path}: the manifest of {manifest.name} (step {manifest.step}) lies in "
            f"{directory.name}; expected the directory's own",
            damaged=[f"{MANIFEST}: belongs to {manifest.name}"],
        )
    return manifest


def find_damage(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """A line for each file that differs from the manifest; empty when all is as committed.

    With `contents` every byte is read and its checksum compared, else sizes alone are.
    `progress` is told the bytes of each file when it is done.
    """
    damaged = []
    for entry in manifest.files:
        path = directory / entry.path
        if not path.resolve().is_relative_to(directory.resolve()):
            damaged.append(f"{entry.path}: leads outside the checkpoint")
            continue
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                damaged.append(f"{entry.path}: {size} bytes, expected {entry.bytes}")
            elif contents and (found := file_checksum(path)) != entry.checksum:
                damaged.append(f"{entry.path}: checksum {found}, expected {entry.checksum}")
        except FileNotFoundError:
            damaged.append(f"{entry.path}: missing")
        except OSError as error:
            damaged.append(f"{entry.path}: cannot be read: {error.strerror}")
        if progress:
            progress(entry.bytes)
    return damaged
