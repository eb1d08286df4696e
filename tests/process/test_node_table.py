"""The ranks of a node read `.metadata` once and share its columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.forked_ranks import run_ranks
from tests.unit.test_column_reader import assert_same, content

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.format import metadata
from holdfast.trainer.format.metadata import METADATA, open_checkpoint
from holdfast.trainer.loading import reader
from holdfast.trainer.loading.node import mapped, published
from holdfast.trainer.loading.reader import open_together
from holdfast.trainer.ranks.collective import ControlGroup

RANKS = 3


def write(directory: Path, made: bytes) -> Manifest:
    """Write `.metadata` and a manifest that lists it and the files that it names."""
    (directory / METADATA).write_bytes(made)
    extents = metadata.parse_metadata(made, "here").storage_data
    sizes: dict[str, int] = {}
    for info in extents.values():
        end = info.offset + info.length
        sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    checksum = FileChecksum(len(made))
    checksum.update(made)
    files = [FileEntry.of(METADATA, len(made), checksum)]
    files += [FileEntry(path=path, bytes=size, checksum="0" * 32) for path, size in sizes.items()]
    return Manifest(
        run_uid="a" * 32,
        run="run",
        name=directory.name,
        step=1,
        attempt=1,
        launch=1,
        world_size=RANKS,
        files=tuple(files),
        committed_at=1.0,
    )


def shared_tables() -> int:
    """The shared memory that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("holdfast-node-table")


def counted(monkeypatch: Any) -> list[Path]:
    """The directories whose `.metadata` this process has read."""
    seen: list[Path] = []
    plain = metadata._read_with

    def count(directory: Path, *given: Any) -> Any:
        seen.append(directory)
        return plain(directory, *given)

    monkeypatch.setattr(metadata, "_read_with", count)
    return seen


def test_value_with_arrays_is_the_same_in_shared_memory_and_outlives_its_path() -> None:
    value: dict[str, Any] = {
        "a": np.arange(12).reshape(3, 4)[1:],
        "b": np.zeros(0, np.int32),
        "c": "text",
    }
    with published(value) as path:
        found = mapped(path)
    assert found["c"] == "text"
    for key in ("a", "b"):
        assert np.array_equal(found[key], value[key])
        assert found[key].dtype == value[key].dtype
    assert not found["a"].flags.writeable
    with pytest.raises(OSError, match="No such file"):
        mapped(path)


@pytest.mark.parametrize("case", ["shared", "hidden", "two nodes", "other form", "damaged"])
def test_ranks_of_a_node_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    made = content()
    manifest = write(tmp_path, made)
    expected = open_checkpoint(tmp_path, manifest, is_lean=True)
    if case == "damaged":
        with open(tmp_path / METADATA, "r+b") as stream:
            stream.seek(len(made) // 2)
            stream.write(bytes([made[len(made) // 2] ^ 1]))
    if case == "other form":
        monkeypatch.setattr(reader, "open_columns", lambda *_: None)

    def act() -> None:
        ranks = ControlGroup()
        seen = counted(monkeypatch)
        if case == "two nodes":
            home = "boot", f"host{ranks.rank // 2}", "pid"
            monkeypatch.setattr(reader, "find_home", lambda: home)
        if case == "hidden" and ranks.rank == 1:

            def refuse(_: str) -> Any:
                raise PermissionError("another container")

            monkeypatch.setattr(reader, "mapped", refuse)
        try:
            if case == "damaged":
                with pytest.raises(DamagedCheckpointError) as damaged:
                    open_together(tmp_path, ranks.group, manifest)
                assert "checksum" in damaged.value.damaged[0]
                return
            opened = open_together(tmp_path, ranks.group, manifest)
        finally:
            ranks.close()
        assert_same(opened.boxes, expected.boxes)
        assert opened.metadata.planner_data == expected.metadata.planner_data
        entries = opened.metadata.state_dict_metadata, expected.metadata.state_dict_metadata
        assert entries[0].keys() == entries[1].keys()
        assert opened.is_lean is (case != "other form")
        assert opened.manifest == manifest
        reads, tables = {
            "shared": ([1, 0, 0], [1, 1, 1]),
            "hidden": ([1, 1, 0], [1, 0, 1]),
            "two nodes": ([1, 0, 1], [1, 1, 0]),
            "other form": ([1, 1, 1], [0, 0, 0]),
        }[case]
        assert len(seen) == reads[ranks.rank]
        assert shared_tables() == tables[ranks.rank]

    run_ranks(RANKS, tmp_path / "store", act)
