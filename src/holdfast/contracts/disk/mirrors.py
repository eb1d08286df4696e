"""Locations of mirrored and node-local checkpoints, and the record of each mirrored copy.

A mirror is a directory or an object store, given as a URL. Each run has its own location in it,
named after the run's folder and uid. A mirrored checkpoint is committed once its manifest is in the
mirror, as on disk. With a node-local tier, each node writes to its own disk first, and the run's
folder contains only the manifests of mirrored checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.contracts import environment
from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.bounds import ByteCount, FilePath, Moment, Seconds
from holdfast.contracts.disk.paths import MANIFEST, MIRRORED, RunPaths
from holdfast.contracts.errors import ForeignFileError, SpecError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


class MirrorRecord(BaseModel):
    """`mirrored.json`, beside a manifest: the mirror has the whole checkpoint. Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: FilePath
    bytes: ByteCount
    seconds: Seconds
    mirrored_at: Moment


@dataclass(frozen=True)
class Tiers:
    """The mirror and the node-local tier of a job's checkpoints. An empty string means none."""

    mirror: str = ""
    local: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Tiers:
        """Return the tiers that the environment variables set.

        Raises `SpecError` for bad values without an agent, which passes on those of a spec.
        """
        found = cls(
            mirror=variables.get(environment.CHECKPOINT_MIRROR, ""),
            local=variables.get(environment.CHECKPOINT_LOCAL, ""),
        )
        # With an agent, the values come from a spec that was validated at submission.
        if not variables.get(environment.RUN_DIRECTORY):
            found._check()
        return found

    def _check(self) -> None:
        if self.mirror and (problem := problem_with_mirror(self.mirror)):
            raise SpecError(f"{environment.CHECKPOINT_MIRROR}: {problem}")
        if self.local and not self.local.startswith("/"):
            raise SpecError(
                f"{environment.CHECKPOINT_LOCAL}={self.local!r}: expected an absolute path"
            )
        if self.local and not self.mirror:
            raise SpecError(
                f"{environment.CHECKPOINT_LOCAL} is set without {environment.CHECKPOINT_MIRROR}: "
                "files on a node's disk are lost with the node; set both"
            )

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that pass these tiers to a program."""
        named = {
            environment.CHECKPOINT_MIRROR: self.mirror,
            environment.CHECKPOINT_LOCAL: self.local,
        }
        return {name: value for name, value in named.items() if value}

    def location(self, run: str, run_uid: str) -> str:
        """Return the URL of a run's location in the mirror."""
        return f"{self.mirror.rstrip('/')}/{place_of(run, run_uid)}"

    def node_folder(self, run: str, run_uid: str) -> RunPaths | None:
        """Return the run's folder on the node's own disk, or None without a node-local tier."""
        return RunPaths(Path(self.local) / place_of(run, run_uid)) if self.local else None


def place_of(run: str, run_uid: str) -> str:
    """Return a run's name where runs of several roots are together: its folder's name and uid."""
    return f"{run}.{run_uid}"


def checkpoint_folder(name: str) -> str:
    """Return the key of a checkpoint's folder, relative to the run's location in the mirror."""
    return f"checkpoints/{name}"


def checkpoint_key(name: str, path: str = MANIFEST) -> str:
    """Return the key of a checkpoint's file, relative to the run's location in the mirror."""
    return f"{checkpoint_folder(name)}/{path}"


def tombstone_key(name: str) -> str:
    """Return the key of a deleted checkpoint's manifest, relative to the run's location."""
    return f"tombstones/{name}.json"


def problem_with_mirror(url: str) -> str | None:
    """Return the problem with the URL of a mirror as text, or None."""
    parts = urlsplit(url)
    if not parts.scheme or not _SCHEME.fullmatch(parts.scheme) or "://" not in url:
        return f"{url!r}: expected a URL such as s3://bucket/prefix or file:///shared/directory"
    if "@" in parts.netloc:
        # Specs and journals contain the URL, and with it the secret.
        return "a mirror's URL must not contain credentials; set them in the environment (AWS_…)"
    if parts.query or parts.fragment:
        return f"{url!r}: expected no `?` or `#` in a mirror's URL"
    if not parts.netloc and not parts.path.startswith("/"):
        return f"{url!r}: expected a bucket, a host or an absolute path after `://`"
    return None


def write_record(directory: Path, record: MirrorRecord) -> None:
    """Record beside a checkpoint's manifest that the mirror has the whole checkpoint."""
    durable.write_bytes(directory / MIRRORED, durable.to_json(record.model_dump(mode="json")))


def read_record(directory: Path) -> MirrorRecord | None:
    """Return the record of the mirrored copy, or None if there is none that can be read."""
    try:
        content = reading.read_bounded(directory / MIRRORED, below=directory.parent)
        return MirrorRecord.model_validate_json(content)
    except (FileNotFoundError, NotADirectoryError, ForeignFileError, ValidationError):
        return None
