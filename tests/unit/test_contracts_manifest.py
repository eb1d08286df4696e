"""Manifests: a committed checkpoint verifies, and every difference from it is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.runs import file_checksum

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.digests import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    FileChecksum,
    block_bytes_of,
    digest_of,
)
from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.manifest import FileEntry, Manifest, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName
from holdfast.contracts.errors import DamagedCheckpointError

CONTENTS = {".metadata": b"m" * 100, "__0_0.distcp": bytes(range(256)) * 64, "pp0/a.json": b"{}"}


def commit(under: Path, **changes: Any) -> tuple[Path, Manifest]:
    """Write a committed checkpoint of step 7 into the folder `under`, with real files."""
    name = str(CheckpointName(7, 1, 1))
    directory = under / name
    for path, content in CONTENTS.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    files = tuple(
        FileEntry(path=path, bytes=len(content), checksum=file_checksum(directory / path))
        for path, content in CONTENTS.items()
    )
    facts: dict[str, Any] = {
        "run_uid": "u" * 32,
        "run": "run",
        "name": name,
        "step": 7,
        "attempt": 1,
        "launch": 1,
        "world_size": 2,
        "files": files,
        "committed_at": 1.5,
    }
    manifest = Manifest(**(facts | changes))
    (directory / MANIFEST).write_bytes(to_json(manifest.model_dump(mode="json")))
    return directory, manifest


def test_a_manifest_is_read_back_and_verifies(tmp_path: Path) -> None:
    directory, manifest = commit(tmp_path, parent="run:step-00000003.a0001.l01")
    seen: list[int] = []
    assert read_manifest(directory) == manifest
    assert find_damage(directory, manifest, progress=seen.append) == []
    assert sum(seen) == manifest.bytes == sum(map(len, CONTENTS.values()))
    assert manifest.id == f"run:{directory.name}"


def test_a_directory_without_a_manifest_was_never_committed(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "none") is None


def flip_a_bit(directory: Path) -> None:
    path = directory / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[5000] ^= 4
    path.write_bytes(content)


def truncate(directory: Path) -> None:
    path = directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def link_outside(directory: Path) -> None:
    outside = directory.parent / "outside"
    (directory / ".metadata").rename(outside)
    (directory / ".metadata").symlink_to(outside)


def replace_with_folder(directory: Path) -> None:
    (directory / "pp0/a.json").unlink()
    (directory / "pp0/a.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (flip_a_bit, "__0_0.distcp: checksum "),
        (truncate, "__0_0.distcp: 16383 bytes, expected 16384"),
        (lambda d: (d / "pp0/a.json").unlink(), "pp0/a.json: missing"),
        (link_outside, ".metadata: a link that leads outside its folder"),
        (replace_with_folder, "pp0/a.json: "),
    ],
)
def test_damage_is_detected_and_the_file_named(
    damage: Callable[[Path], None], line: str, tmp_path: Path
) -> None:
    directory, manifest = commit(tmp_path)
    damage(directory)
    found = find_damage(directory, manifest)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_checking_sizes_alone_does_not_detect_a_flipped_bit(tmp_path: Path) -> None:
    directory, manifest = commit(tmp_path)
    flip_a_bit(directory)
    assert find_damage(directory, manifest, contents=False) == []
    truncate(directory)
    assert len(find_damage(directory, manifest, contents=False)) == 1


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/.", "a\\b", "a/"]
)
def test_a_file_path_outside_the_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="expected a relative path inside"):
        FileEntry(path=path, bytes=1, checksum="0")


def test_a_manifest_moved_to_another_directory_is_refused(tmp_path: Path) -> None:
    directory, _ = commit(tmp_path)
    moved = directory.rename(tmp_path / str(CheckpointName(8, 1, 1)))
    with pytest.raises(DamagedCheckpointError, match="expected the directory's own"):
        read_manifest(moved)


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    directory, _ = commit(tmp_path, step=8)
    with pytest.raises(DamagedCheckpointError) as raised:
        read_manifest(directory)
    assert raised.value.damaged == (f"{MANIFEST}: belongs to {directory.name}",)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"format": 1}'])
def test_a_torn_manifest_counts_as_damaged_not_as_missing(content: bytes, tmp_path: Path) -> None:
    directory, _ = commit(tmp_path)
    (directory / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="not a manifest of format 1"):
        read_manifest(directory)


def test_a_newer_format_is_refused_and_newer_keys_are_ignored(tmp_path: Path) -> None:
    directory, manifest = commit(tmp_path)
    document = json.loads((directory / MANIFEST).read_bytes())
    (directory / MANIFEST).write_text(json.dumps({**document, "colour": "blue"}))
    assert read_manifest(directory) == manifest
    (directory / MANIFEST).write_text(json.dumps({**document, "format": 2}))
    with pytest.raises(DamagedCheckpointError, match="not a manifest of format 1: format"):
        read_manifest(directory)


def test_a_nan_or_infinite_metric_is_dropped_from_the_manifest(tmp_path: Path) -> None:
    directory, _ = commit(tmp_path, metrics={"loss": math.nan, "norm": math.inf, "lr": 0.5})
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.metrics == {"lr": 0.5}
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_equal_checksums_mean_equal_contents(tmp_path: Path) -> None:
    _, first = commit(tmp_path / "a")
    _, second = commit(tmp_path / "b", committed_at=99.0, run="other")
    turned = first.model_copy(update={"files": first.files[::-1]})
    changed = first.model_copy(update={"files": first.files[1:]})
    assert first.checksum == second.checksum == turned.checksum != changed.checksum


def test_a_file_checksum_does_not_depend_on_the_chunk_sizes() -> None:
    for size in (0, 5, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 77):
        content = (bytes(range(251)) * (size // 251 + 1))[:size]
        running = FileChecksum(size)
        for start in range(0, size, 777_777):
            running.update(content[start : start + 777_777])
        entry = FileEntry.of("file", size, running)
        assert entry.difference(content) is None
        assert len(entry.spans()) == max(1, -(-size // BLOCK_BYTES))
        if size <= BLOCK_BYTES:
            assert (entry.checksum, entry.blocks) == (digest_of(content), "")


def test_the_block_size_grows_so_that_a_manifest_stays_small() -> None:
    for size in (BLOCK_BYTES + 1, 2**30, 2**30 + 1, 2**40):
        blocks = -(-size // block_bytes_of(size))
        assert (2 if size < 2**30 else BLOCKS_MAX // 2) <= blocks <= BLOCKS_MAX
    assert block_bytes_of(2**30 + 1) == 2 * BLOCK_BYTES


def commit_long(under: Path) -> tuple[Path, Manifest]:
    """Write a checkpoint whose only file has three blocks, the last one shorter."""
    content = bytes(range(256)) * (9 * 1024 * 1024 // 256)
    running = FileChecksum(len(content))
    running.update(content)
    directory, manifest = commit(under, files=(FileEntry.of("long", len(content), running),))
    (directory / "long").write_bytes(content)
    return directory, manifest


def test_damage_inside_a_long_file_is_located_by_block(tmp_path: Path) -> None:
    directory, manifest = commit_long(tmp_path)
    seen: list[int] = []
    assert find_damage(directory, manifest, progress=seen.append) == []
    assert (sum(seen), len(seen)) == (manifest.bytes, 3)
    with open(directory / "long", "r+b") as stream:
        for at in (BLOCK_BYTES + 9, manifest.bytes - 1):
            stream.seek(at)
            stream.write(b"\x07")
    (line,) = find_damage(directory, manifest)
    assert line.startswith("long: bytes 4194304 to 8388607: checksum ")
    assert line.endswith(", and 1 more blocks")


def test_a_long_file_of_an_older_manifest_still_verifies(tmp_path: Path) -> None:
    directory, manifest = commit_long(tmp_path)
    content = (directory / "long").read_bytes()
    older = FileEntry(path="long", bytes=len(content), checksum=digest_of(content))
    manifest = manifest.model_copy(update={"files": (older,)})
    assert find_damage(directory, manifest) == []
    (directory / "long").write_bytes(content[:-1] + b"\x07")
    assert find_damage(directory, manifest)[0].startswith("long: checksum ")


def test_block_digests_that_do_not_match_the_checksum_are_refused(tmp_path: Path) -> None:
    directory, manifest = commit_long(tmp_path)
    document = json.loads((directory / MANIFEST).read_bytes())
    blocks = document["files"][0]["blocks"]
    for changed in (blocks[:-1], blocks[:-1] + ("0" if blocks[-1] != "0" else "1"), ""):
        document["files"][0]["blocks"] = changed
        (directory / MANIFEST).write_text(json.dumps(document))
        with pytest.raises(DamagedCheckpointError, match=r"files\.0: .*block digests"):
            read_manifest(directory)
    assert manifest.files[0].blocks == blocks
