"""The lists of shards that nodes write, and how a loss of shards is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.trainer.flusher.shards import RANKS_NAMED_MAX, ShardLists, name_shards


def writes_message(
    folder: Path, rank: int, *keys: str, total: int = 0, ranks: int = 1
) -> dict[str, Any]:
    return {
        "kind": "writes",
        "folder": str(folder),
        "node": 1,
        "local_ranks": ranks,
        "files": [f"__{rank}_0.distcp"] if keys else [],
        "keys": list(keys),
        "keys_total": total or len(keys),
    }


def write_list(folder: Path, *messages: dict[str, Any]) -> None:
    lists, found = ShardLists(), None
    for rank, message in enumerate(messages):
        assert found is None, "the list is complete before all ranks reported"
        found = lists.hear(rank, {**message, "local_ranks": len(messages)})
    assert found is not None
    found.leave()


def test_files_and_keys_are_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    write_list(
        tmp_path,
        writes_message(tmp_path, 0, "a", "b"),
        writes_message(tmp_path, 1, "c", total=9),
        writes_message(tmp_path, 2),
    )
    assert name_shards(tmp_path, [1]) == (
        "__0_0.distcp with a, b; __1_0.distcp with c and 8 more keys; no file of rank 2"
    )
    many = RANKS_NAMED_MAX + 3
    write_list(tmp_path, *(writes_message(tmp_path, rank, "a") for rank in range(many)))
    assert name_shards(tmp_path, [1]).endswith("__3_0.distcp with a; and those of 3 more ranks")


@pytest.mark.parametrize("content", [None, b"", b'{"node": 1}', b"not JSON"])
def test_a_missing_or_damaged_shard_list_gives_no_names(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "shards-node-0001.json").write_bytes(content)
    assert name_shards(tmp_path, [1]) == ""


def test_a_new_launch_starts_a_new_list(tmp_path: Path) -> None:
    lists = ShardLists()
    assert lists.hear(0, writes_message(tmp_path / "01", 0, "a", ranks=2)) is None
    assert lists.hear(1, writes_message(tmp_path / "02", 1, "a", ranks=2)) is None
    found = lists.hear(0, writes_message(tmp_path / "02", 0, "a", ranks=2))
    assert found is not None
    assert sorted(found.shards) == [0, 1]


def test_a_shard_list_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    write_list(tmp_path / "file" / "01", writes_message(tmp_path / "file" / "01", 0, "a"))
    assert "the list of shards was not written" in capfd.readouterr().err
