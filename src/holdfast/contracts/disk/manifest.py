"""The manifest, which is written last and makes a directory of files a checkpoint.

A checkpoint is committed exactly when its manifest is durable under its own name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from holdfast.contracts.disk import bounds, digests, durable, filesystems, reading
from holdfast.contracts.disk.paths import (
    MANIFEST,
    METADATA,
    CheckpointName,
    RunPaths,
    base_of,
    real_folder,
)
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, ForeignFileError
from holdfast.contracts.plain_text import counted

# Where the files of a checkpoint are: in its directory, or where the program itself wrote them.
#
# A checkpoint that the program wrote has a directory in the run's folder with nothing but a
# manifest, and the manifest names the folder of the files as its `source`.

# The journal's `by` and reason when a program's checkpoint ends.
PROGRAM: Final = "the program"
GONE: Final = "the program deleted its files"
REPLACED: Final = "the program wrote other files in their place"


@contextlib.contextmanager
def files_folder(directory: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the folder of the files that the manifest in `directory` lists.

    For a checkpoint that the program wrote, that is the folder which the manifest names. Anyone may
    write any name into their manifest, so it counts only if it belongs to the manifest's
    owner. Raises `ForeignFileError` for any other folder, and `OSError` if there is none.
    """
    if manifest.source is None:
        yield directory
        return
    source = Path(manifest.source)
    if not source.is_absolute():
        raise ForeignFileError(source, "not an absolute path")
    # Held open, so the folder whose owner is compared is the one whose files are read.
    with reading.held_folder(source, below=source.parent) as held:
        # Another user's manifest could name any folder of this user, see decision 76.
        if held.stat().st_uid != (directory / MANIFEST).lstat().st_uid:
            raise ForeignFileError(source, "a folder of another user than the checkpoint's")
        yield held


def is_dcp(manifest: Manifest) -> bool:
    """Return True if the checkpoint's files are those of DCP, in any directory."""
    return any(entry.path == METADATA for entry in manifest.files)


def require_own_directory(manifest: Manifest, action: str, instead: str = "") -> None:
    """Raise `CheckpointError` if the program wrote the checkpoint to its own directory.

    `action` names what is refused, such as `export it`, and `instead` what to do.
    """
    if manifest.source is not None:
        raise CheckpointError(
            f"{manifest.id}: the program itself wrote this checkpoint, so Holdfast cannot "
            f"{action}; its files are in {manifest.source}" + (f". {instead}" if instead else "")
        )


def require_readable(manifest: Manifest, action: str) -> None:
    """Raise `CheckpointError` if the program wrote the checkpoint in its own format."""
    if not is_dcp(manifest):
        require_own_directory(manifest, action)


def record_source(paths: RunPaths, manifest: Manifest) -> bool:
    """Create the manifest in the run, durably; return False if the checkpoint has one."""
    # Exclusive: a node or an earlier launch may have recorded the same checkpoint already.
    directory = paths.checkpoint(manifest.name)
    durable.make_directory(directory)
    return durable.create_bytes(directory / MANIFEST, encode_manifest(manifest))


def retire_source(paths: RunPaths, name: CheckpointName | str) -> None:
    """Make the manifest a tombstone, because the program deleted or replaced its files.

    Journal the line `checkpoint_deleted` before. Does nothing if another process was faster.
    """
    directory = paths.checkpoint(name)
    durable.make_directory(paths.tombstones)
    try:
        # A rename keeps the bytes of the manifest and selects one of several processes.
        os.rename(directory / MANIFEST, paths.tombstone(name))
    except FileNotFoundError:
        return
    # Before the folder goes. Otherwise a power cut could leave neither manifest nor tombstone.
    durable.fsync_directory(paths.tombstones)
    # The directory stays if it contains any other file, which Holdfast did not write.
    with contextlib.suppress(OSError):
        directory.rmdir()
    durable.fsync_directory(paths.checkpoints)


FORMAT: Final = 1
# The manifest of 10,000 ranks with a file of 256 blocks each has 84 MB.
MANIFEST_BYTES_MAX: Final = 1 << 28
# The digest is at the end of the file, so a search of the last bytes finds it.
DIGEST_SEARCH_BYTES: Final = 200
_DIGEST = re.compile(rb',\s*"digest": "([^"]*)"\s*}\s*$')


class FileEntry(BaseModel):
    """One file of a checkpoint. `path` is relative to the checkpoint, with forward slashes.

    For a file of more than one block, `blocks` has the concatenated digests of its blocks of
    `block_bytes`, and `checksum` is the digest of those. Otherwise `checksum` is the digest of the
    file's bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: bounds.FilePath
    bytes: bounds.ByteCount
    checksum: bounds.Name
    block_bytes: bounds.ByteCount = 0
    blocks: bounds.Text = ""

    @classmethod
    def of(cls, path: str, size_bytes: int, checksum: digests.FileChecksum) -> Self:
        """Return the entry of a file whose bytes have all been added to `checksum`."""
        whole, blocks = checksum.finish()
        return cls(
            path=path,
            bytes=size_bytes,
            checksum=whole,
            block_bytes=checksum.block_bytes,
            blocks=blocks,
        )

    def spans(self) -> list[tuple[int, int, str]]:
        """Return (start, bytes, digest) of every part of the file that has its own digest."""
        if not self.blocks:
            return [(0, self.bytes, self.checksum)]
        return [
            (
                start,
                min(self.block_bytes, self.bytes - start),
                self.blocks[index * digests.DIGEST_HEX : (index + 1) * digests.DIGEST_HEX],
            )
            for index, start in enumerate(range(0, self.bytes, self.block_bytes))
        ]

    def difference(self, content: digests.Content) -> str | None:
        """Return how a file's whole content differs from this entry as text, or None."""
        if len(content) != self.bytes:
            return f"{len(content)} bytes, expected {self.bytes}"
        for start, size, expected in self.spans():
            if (found := digests.digest_of(content[start : start + size])) != expected:
                return self.describe(start, found)
        return None

    def describe(self, start: int, found: str) -> str:
        """Return the text for a part at `start` that has the digest `found` instead of its own."""
        size, expected = next((span[1], span[2]) for span in self.spans() if span[0] == start)
        where = f"bytes {start} to {start + size - 1}: " if self.blocks else ""
        return f"{where}checksum {found}, expected {expected}"

    @field_validator("path")
    @classmethod
    def _path_stays_inside(cls, value: str) -> str:
        parts = value.split("/")
        strange = value.startswith("/") or "\\" in value or "\0" in value
        if strange or {"", ".", ".."} & set(parts):
            raise ValueError(f"{value!r}: expected a relative path inside the checkpoint")
        return value

    @model_validator(mode="after")
    def _blocks_are_the_checksum_s(self) -> Self:
        if not self.blocks and not self.block_bytes:
            return self
        blocks = -(-self.bytes // self.block_bytes) if self.block_bytes else 0
        if len(self.blocks) != blocks * digests.DIGEST_HEX:
            raise ValueError(
                f"{self.path}: {len(self.blocks)} characters of block digests, expected "
                f"{blocks * digests.DIGEST_HEX} for {self.bytes} bytes in blocks of "
                f"{self.block_bytes}"
            )
        if digests.checksum_of_blocks(self.blocks) != self.checksum:
            raise ValueError(f"{self.path}: its checksum does not match its block digests")
        return self


class Manifest(BaseModel):
    """The commit record of one checkpoint. Times are Unix seconds, durations seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    run_uid: bounds.Name
    run: bounds.Name
    name: bounds.Name = Field(description="the checkpoint's directory name")
    step: Annotated[int, Field(ge=0, le=bounds.STEP_MAX)]
    attempt: Annotated[int, Field(ge=0, le=bounds.NUMBER_MAX)]
    launch: Annotated[int, Field(ge=0, le=bounds.NUMBER_MAX)]
    world_size: Annotated[int, Field(ge=1, le=bounds.RANKS_MAX)]
    parent: bounds.Name | None = Field(
        default=None, description="id of the checkpoint before this one, `run:directory`"
    )
    reason: bounds.Name = Field(
        default="interval", description="interval, final, crash, request, notice or import"
    )
    command_digest: bounds.Name = ""
    checksum_algorithm: Literal["xxh3_128"] = "xxh3_128"
    files: tuple[FileEntry, ...]
    source: bounds.FilePath | None = Field(
        default=None,
        description="folder of the files that the program wrote itself; None: the checkpoint's own",
    )
    blocked_s: bounds.Seconds = Field(
        default=0.0, description="seconds for which the save blocked the slowest rank"
    )
    flush_s: bounds.Seconds = Field(
        default=0.0, description="seconds from the seal to the last data fsync"
    )
    staged_at: bounds.Moment = 0.0
    committed_at: bounds.Moment
    versions: dict[str, str] = Field(default_factory=dict)
    topology: dict[str, Any] = Field(default_factory=dict)
    skips: tuple[tuple[bounds.Step, bounds.Step], ...] = Field(
        default=(), description="skipped data: [first_step, steps]"
    )
    metrics: dict[str, bounds.Real] = Field(
        default_factory=dict, description="finite values only, because JSON has no others"
    )
    is_placed: bool = Field(
        default=False, description="saved by `dcp.save` to a directory that the program chose"
    )

    @field_validator("files")
    @classmethod
    def _files_are_listed_once(cls, value: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        if len({entry.path for entry in value}) < len(value):
            ((twice, count),) = Counter(entry.path for entry in value).most_common(1)
            raise ValueError(f"{twice!r} is listed {counted(count, 'time')}, expected once")
        if (total := sum(entry.bytes for entry in value)) > bounds.BYTES_MAX:
            raise ValueError(f"{total} bytes in all files, expected at most {bounds.BYTES_MAX}")
        return value

    @field_validator("topology")
    @classmethod
    def _topology_is_bounded(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := bounds.problem_with_numbers(value):
            raise ValueError(problem)
        return value

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics_are_finite(cls, value: Any) -> Any:
        # A NaN loss must not make the manifest of a good checkpoint unreadable.
        if not isinstance(value, dict):
            return value
        return {
            name: number
            for name, number in value.items()
            if number is not None
            and (not isinstance(number, float | int) or abs(number) <= bounds.REAL_MAX)
        }

    @property
    def id(self) -> str:
        """The checkpoint's id, `<run>:<directory name>`."""
        return f"{self.run}:{self.name}"

    @property
    def bytes(self) -> int:
        """The bytes of all files, without the manifest."""
        return sum(entry.bytes for entry in self.files)

    @property
    def checksum(self) -> str:
        """The SHA-256 of the file table. Equal checksums mean equal contents."""
        return digests.document_digest(sorted((e.path, e.bytes, e.checksum) for e in self.files))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes on disk: JSON that ends with the digest of all bytes before."""
    body = durable.to_json(manifest.model_dump(mode="json")).removesuffix(b"\n}\n")
    return body + f',\n "digest": "{digests.digest_of(body)}"\n}}\n'.encode()


def _read(path: str, directory: Path) -> bytes | None:
    try:
        return reading.read_bounded(path, MANIFEST_BYTES_MAX, below=directory.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_manifest(directory: Path, *, is_copy: bool = False) -> Manifest | None:
    """Return the manifest in `directory`, or None if the checkpoint was never committed.

    Raises `DamagedCheckpointError` for an invalid manifest: not JSON, of another format, or of
    another checkpoint than the directory's, unless it `is_copy`, which may have any name. Raises
    `OSError` if storage cannot read it.
    """
    # A string is faster than a `Path`, and a run may have ten thousand checkpoints.
    path = f"{directory}/{MANIFEST}"
    try:
        content = _read(path, directory)
        if content is None and filesystems.is_there(Path(path)):
            # Another node has committed since this host last looked.
            content = _read(path, directory)
    except ForeignFileError as error:
        raise DamagedCheckpointError(
            f"{error}; expected the manifest of a checkpoint",
            damaged=[f"{MANIFEST}: {error.problem}"],
        ) from error
    if content is None:
        return None
    _check_digest(path, content)
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise DamagedCheckpointError(
            f"{path}: not a manifest of format {FORMAT}: {where}: {first['msg']}",
            damaged=[f"{MANIFEST}: {where}: {first['msg']}"],
        ) from error
    name = CheckpointName(manifest.step, manifest.attempt, manifest.launch)
    if is_copy and manifest.name == str(name):
        return manifest
    if manifest.is_placed and CheckpointName.parse(directory.name) is None:
        # A program chose the directory, and may rename it.
        return manifest
    if not directory.name == manifest.name == str(name):
        raise DamagedCheckpointError(
            f"{path}: the manifest of {manifest.name} (step {manifest.step}) is in the directory "
            f"{directory.name}; expected the directory's own manifest",
            damaged=[f"{MANIFEST}: belongs to {manifest.name}"],
        )
    return manifest


def read_tombstone(path: Path) -> Manifest | None:
    """Return the manifest of a deleted checkpoint; None if it cannot be read or is invalid."""
    try:
        folder = real_folder(path.parent)
        content = reading.read_bounded(
            folder / path.name, MANIFEST_BYTES_MAX, below=base_of(folder)
        )
        return Manifest.model_validate_json(content)
    except (ValidationError, OSError, ForeignFileError):
        return None


def _check_digest(path: str, content: bytes) -> None:
    """Raise `DamagedCheckpointError` if the bytes differ from the digest at the manifest's end.

    Manifests of earlier versions have no digest.
    """
    found = _DIGEST.search(content, max(0, len(content) - DIGEST_SEARCH_BYTES))
    if found and digests.digest_of(memoryview(content)[: found.start()]).encode() != found[1]:
        problem = "its bytes do not match the digest at its end"
        raise DamagedCheckpointError(
            f"{path}: {problem}; it has changed since the commit",
            damaged=[f"{MANIFEST}: {problem}"],
        )


def committed_checkpoints(paths: RunPaths) -> list[Manifest]:
    """Return the manifests of the run's committed checkpoints, oldest step first.

    Damaged checkpoints are skipped here; `holdfast verify` reports them.
    """
    return list(_manifests(paths.list_checkpoints()))


def newest_committed(paths: RunPaths, attempt: int) -> Manifest | None:
    """Return the manifest of the newest step that `attempt` committed, or None."""
    own = [
        directory
        for directory in reversed(paths.list_checkpoints())
        if (name := CheckpointName.parse(directory.name)) and name.attempt == attempt
    ]
    return next(_manifests(own), None)


def _manifests(directories: Iterable[Path]) -> Iterator[Manifest]:
    for directory in directories:
        try:
            manifest = read_manifest(directory)
        except DamagedCheckpointError:
            continue
        if manifest is not None:
            yield manifest
