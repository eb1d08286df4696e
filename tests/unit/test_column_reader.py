"""The column reader: the same boxes as the object reader finds, and no other form."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.test_planning import number_of, pickle_metadata, plan, rank_of, row_of
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.trainer.format.column_reader import OtherForm, read_columns
from holdfast.trainer.format.metadata import METADATA, open_checkpoint, parse_metadata
from holdfast.trainer.format.opcodes import COMPARED_AT_ONCE, encode_storage_meta
from holdfast.trainer.format.saved_boxes import BoxTable

RANKS = 7


def content() -> bytes:
    """A `.metadata` of tensors of 0, 1, 2 and 3 dimensions, numbers, and keys of single ranks."""
    big, ranks = 1 << 33, []
    for rank in range(RANKS):
        rows = [
            row_of("line", (RANKS * 5,), (rank * 5,), (5,)),
            row_of("table", (RANKS * 2, 6), (rank * 2, 0), (2, 6)),
            row_of("cube", (4, RANKS, 3), (0, rank, 0), (4, 1, 3)),
            row_of("wide", (RANKS, big), (rank, 0), (1, big)),
            row_of("scalar", (), (), ()),
            row_of(f"rng.rank{rank:05d}.cpu", (16,), (0,), (16,)),
            number_of("lr"),
        ]
        ranks.append(rank_of(rows))
    return pickle_metadata(plan(ranks))


def read(content: bytes) -> BoxTable:
    return read_columns(iter((content[:100], content[100:])))[1]


def assert_same(columns: BoxTable, objects: BoxTable) -> None:
    assert columns.extents == objects.extents
    assert list(columns.by_key) == list(objects.by_key)
    for key, ours in columns.by_key.items():
        theirs = objects.by_key[key]
        for name in ("offsets", "sizes", "offset", "length"):
            mine, expected = getattr(ours, name), getattr(theirs, name)
            assert mine.shape == expected.shape, (key, name)
            assert np.array_equal(mine, expected), (key, name)
        names = [[table.files[n] for n in boxes.file] for table, boxes in (
            (columns, ours), (objects, theirs)
        )]  # fmt: skip
        assert names[0] == names[1], key


def test_columns_are_the_boxes_that_the_object_reader_finds() -> None:
    whole = parse_metadata(content(), "here")
    lean, columns = read_columns(iter((content(),)))
    assert_same(columns, BoxTable.of(whole))
    assert lean.planner_data == whole.planner_data
    for key, entry in whole.state_dict_metadata.items():
        found = lean.state_dict_metadata[key]
        assert type(found) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(found, TensorStorageMetadata)
            assert (found.size, found.properties) == (entry.size, entry.properties)


def test_the_storage_meta_of_one_save_is_appended() -> None:
    directory = "/saved/of the program"
    appended = content()[:-1] + encode_storage_meta(directory, "the id")
    for metadata in (pickle.loads(appended), parse_metadata(appended, "here")):
        assert metadata.storage_meta == StorageMeta(checkpoint_id=directory, save_id="the id")
        metadata.storage_meta = None
        assert metadata == pickle.loads(content())
    assert_same(read(appended), BoxTable.of(parse_metadata(content(), "here")))
    for other in (appended[:-1], appended + b".", appended.replace(b"save_id", b"save_ie")):
        with pytest.raises(OtherForm):
            read(other)


@pytest.mark.more
def test_more_boxes_than_are_compared_at_once() -> None:
    count = COMPARED_AT_ONCE + 100
    rows = [row_of("line", (count,), (at,), (1,)) for at in range(count)]
    made = pickle_metadata(plan([rank_of([row]) for row in rows]))
    assert_same(read(made), BoxTable.of(parse_metadata(made, "here")))


@pytest.mark.more
def test_a_changed_byte_is_refused_or_read_as_the_object_reader_reads_it() -> None:
    whole = content()
    chance = random.Random(7)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        try:
            found = read(bytes(changed))
        except OtherForm:
            refused += 1
            continue
        assert_same(found, BoxTable.of(parse_metadata(bytes(changed), "here")))
    assert 0 < refused < 400


@pytest.mark.parametrize("end", [0, 1, 50, 5000, -1])
def test_a_truncated_file_is_of_another_form(end: int) -> None:
    with pytest.raises(OtherForm):
        read(content()[:end])


def test_what_stock_dcp_wrote_is_read_by_the_object_reader(tmp_path: Path) -> None:
    save_with_dcp({"a": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(OtherForm):
        read((tmp_path / METADATA).read_bytes())
    opened = open_checkpoint(tmp_path, is_lean=True)
    assert not opened.is_lean
    assert opened.boxes.by_key["a"].sizes.tolist() == [[6]]
