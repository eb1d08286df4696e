"""Where the copies of a run's checkpoints lie besides its folder, and the record of each copy.

A mirror is a directory or an object store, named by a URL. Under it each run has a place of its
own, named after its folder and identity; in it a checkpoint is committed exactly when its manifest
is there, as on disk. With a node-local tier a node writes to its own disk first, and the run's
folder holds no more than the manifest of what the mirror has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.contracts import environment
from holdfast.contracts.bounds import ByteCount, FilePath, Moment, Seconds
from holdfast.contracts.durable import to_json, write_bytes
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.paths import MANIFEST, MIRRORED, RunPaths
from holdfast.contracts.reading import read_bounded

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


class MirrorRecord(BaseModel):
    """`mirrored.json` beside a manifest: the mirror has the whole checkpoint. Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: FilePath
    bytes: ByteCount
    seconds: Seconds
    mirrored_at: Moment


@dataclass(frozen=True)
class Tiers:
    """The tiers of a job's checkpoints besides the run's folder, as its environment names them.

    Empty strings mean that there is none.
    """

    mirror: str = ""
    local: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Tiers:
        """As the agent, or whoever starts the program by hand, said."""
        return cls(
            mirror=variables.get(environment.CHECKPOINT_MIRROR, ""),
            local=variables.get(environment.CHECKPOINT_LOCAL, ""),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that tell a program of these tiers."""
        named = {
            environment.CHECKPOINT_MIRROR: self.mirror,
            environment.CHECKPOINT_LOCAL: self.local,
        }
        return {name: value for name, value in named.items() if value}

    def location(self, run: str, run_uid: str) -> str:
        """The URL of a run's place in the mirror."""
        return f"{self.mirror.rstrip('/')}/{place_of(run, run_uid)}"

    def node_folder(self, run: str, run_uid: str) -> RunPaths | None:
        """The run's folder on the node's own disk, or None without such a tier."""
        return RunPaths(Path(self.local) / place_of(run, run_uid)) if self.local else None


def files_directory(table: Mapping[str, Any], directory: Path) -> Path:
    """Where a slot's table says that a checkpoint's files go: `directory`, or the node's own."""
    folder = table.get("node_folder")
    return RunPaths(Path(folder)).checkpoint(directory.name) if folder else directory


def place_of(run: str, run_uid: str) -> str:
    """The name of a run where runs of several roots meet: its folder's and its identity's."""
    return f"{run}.{run_uid}"


def checkpoint_folder(name: str) -> str:
    """Under which key a checkpoint's files lie within the run's place in the mirror."""
    return f"checkpoints/{name}"


def checkpoint_key(name: str, path: str = MANIFEST) -> str:
    """Where a file of a checkpoint lies within the run's place in the mirror."""
    return f"{checkpoint_folder(name)}/{path}"


def tombstone_key(name: str) -> str:
    """Where the manifest of a deleted checkpoint lies within the run's place in the mirror."""
    return f"tombstones/{name}.json"


def problem_with_mirror(url: str) -> str | None:
    """What is wrong with the URL of a mirror, in words; None when nothing is."""
    parts = urlsplit(url)
    if not parts.scheme or not _SCHEME.fullmatch(parts.scheme) or "://" not in url:
        return f"{url!r}: expected a URL such as s3://bucket/prefix or file:///shared/directory"
    if "@" in parts.netloc:
        # The URL itself would bring the secret into specs and journals.
        return "a mirror's URL must not hold credentials; give them by environment (AWS_…)"
    if parts.query or parts.fragment:
        return f"{url!r}: expected no `?` or `#` in a mirror's URL"
    if not parts.netloc and not parts.path.startswith("/"):
        return f"{url!r}: expected a bucket, a host or an absolute path after `://`"
    return None


def write_record(directory: Path, record: MirrorRecord) -> None:
    """Note beside a checkpoint's manifest that the mirror has it all."""
    write_bytes(directory / MIRRORED, to_json(record.model_dump(mode="json")))


def read_record(directory: Path) -> MirrorRecord | None:
    """What is known of the mirrored copy; None when there is none, or none that can be read."""
    try:
        content = read_bounded(directory / MIRRORED, below=directory.parent)
        return MirrorRecord.model_validate_json(content)
    except (FileNotFoundError, NotADirectoryError, ForeignFileError, ValidationError):
        return None
