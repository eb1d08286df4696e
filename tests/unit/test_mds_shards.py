"""MDS shards: what MosaicML Streaming 0.13 wrote into `mds_shards`, and damaged copies of it.

`mds_compressed` has a shard of each compression of its `MDSWriter`, and an index of all of them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_streams import alone, check_resumes, flat, read
from torch.utils.data import DataLoader

from holdfast.contracts.errors import SpecError
from holdfast.trainer import Session
from holdfast.trainer.streams import MdsShards
from holdfast.trainer.streams.convert import as_source

WRITTEN = Path(__file__).parent / "mds_shards"
COMPRESSED = Path(__file__).parent / "mds_compressed"
KINDS = ("br", "bz2", "gz", "snappy", "zstd")
SAMPLES = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN, tmp_path / "mds"))


def change(folder: Path, **changes: Any) -> None:
    """Change the index's row of the first shard."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= changes
    (folder / "index.json").write_text(json.dumps(index))


def samples_of(source: MdsShards) -> list[Any]:
    return [sample for name in source.shards() for sample, _ in source.open(name, None)]


def test_samples_are_those_that_were_written(folder: Path) -> None:
    for source in (MdsShards(folder), MdsShards(f"file://{folder}/")):
        samples = samples_of(source)
        assert [sample.pop("f").tolist() for sample in samples] == [
            [list(range(number + 1))] for number in range(SAMPLES)
        ]
        assert [sample.pop("h").tolist() for sample in samples] == [
            [[number] * 2] * 2 for number in range(SAMPLES)
        ]
        assert all(sample["g"].dtype == np.int16 for sample in samples)
        assert [sample.pop("g").tolist() for sample in samples] == [[0, 1, 2]] * SAMPLES
        assert samples == [
            {
                "a": n, "b": "ü" * n, "c": b"\0" * n, "d": n / 2, "e": {"n": [n]}, "i": 10**n,
                "j": n, "k": Decimal("1.50"),
            }
            for n in range(SAMPLES)
        ]  # fmt: skip


def test_columns_that_are_not_decoded_are_bytes(folder: Path) -> None:
    encodings = json.loads((folder / "index.json").read_text())["shards"][0]["column_encodings"]
    change(folder, column_encodings=["pkl", "jpeg", *encodings[2:]])
    source = MdsShards(folder)
    sample = next(source.open(source.shards()[0], 1))[0]
    assert (sample["a"], sample["b"]) == ((1).to_bytes(8, "little"), "ü".encode())


def test_a_stream_of_them_continues_at_any_step_and_any_size(folder: Path) -> None:
    def loader() -> Any:
        keyed = {"transform": lambda sample: sample["a"], "shuffle": True, "buffer": 2}
        return alone(MdsShards(folder), batch=2, open_shards=2, **keyed)

    whole = list(loader())
    assert flat([whole]) == list(range(SAMPLES))
    check_resumes(loader, whole)
    keyed: Any = {"transform": lambda sample: sample["a"], "batch": 1}
    two, saved = read(MdsShards(folder), 2, steps=1, **keyed)
    one, again = read(MdsShards(folder), 1, saved=saved, steps=2, **keyed)
    three, _ = read(MdsShards(folder), 3, saved=again, **keyed)
    assert flat(two + one + three) == list(range(SAMPLES))


@pytest.mark.timeout(120)
def test_with_a_sampler_the_order_is_the_same_at_every_size(folder: Path, tmp_path: Path) -> None:
    data = MdsShards(folder)
    assert [data[number]["a"] for number in range(len(data))] == list(range(SAMPLES))
    with pytest.raises(IndexError, match="expected a number below 7"):
        data[SAMPLES]
    with Session(torch.nn.Linear(1, 1), directory=tmp_path / "run", interval=100) as session:
        sampler = session.sampler(len(data), 3, 2)
        expected = [sorted(batch) for batch in session.sampler(len(data), 3, 2)]
        indexed: Any = data
        loader: Any = DataLoader(indexed, batch_sampler=sampler, collate_fn=list)
        given = [batch for _, batch in zip(session.steps(2), loader, strict=False)]
    assert [sorted(sample["a"] for sample in batch) for batch in given] == expected


def test_damaged_shards_are_refused(folder: Path) -> None:
    path = folder / "shard.00000.mds"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(SpecError, match=r"has 673 bytes, and index\.json says 674"):
        MdsShards(folder).shards()
    source = MdsShards(folder)
    path.write_bytes(content)
    name = source.shards()[0]
    for at in (0, 5, 9):
        path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        with pytest.raises(SpecError, match="its table of samples does not fit"):
            list(source.open(name, None))
    # The size of the first sample's text.
    at = int.from_bytes(content[4:8], "little")
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(SpecError, match="is damaged in sample 0"):
        list(source.open(name, None))
    path.unlink()
    with pytest.raises(SpecError, match="was deleted since the launch began"):
        list(source.open(name, None))
    with pytest.raises(FileNotFoundError):
        source.shards()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(COMPRESSED, tmp_path / "packed"))


def numbers_of(source: MdsShards) -> list[int]:
    return [sample["a"] for sample in samples_of(source)]


def test_compressed_shards_are_read_from_any_position(packed: Path) -> None:
    for source in (MdsShards(packed), MdsShards(f"file://{packed}")):
        names = source.shards()
        assert len(names) == len(KINDS)
        for number, name in enumerate(names):
            samples = [sample for sample, _ in source.open(name, None)]
            assert [sample["a"] for sample in samples] == [10 * number + n for n in range(4)]
            assert [sample["b"] for sample in samples] == ["ü" * n for n in range(4)]
            assert [len(sample["c"]) for sample in samples] == [1, 2, 3, 4]
            for begin in range(5):
                rest = list(source.open(name, begin))
                assert [one["a"] for one, _ in rest] == [sample["a"] for sample in samples[begin:]]
                assert [position for _, position in rest] == list(range(begin + 1, 5))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_compressed_shards_continues_at_any_step(packed: Path, workers: int) -> None:
    def loader() -> Any:
        keyed: dict[str, Any] = {"transform": key_of, "shuffle": True, "buffer": 3}
        return alone(MdsShards(packed), batch=3, open_shards=2, num_workers=workers, **keyed)

    whole = list(loader())
    everything = sorted(10 * kind + n for kind in range(len(KINDS)) for n in range(4))
    assert flat([whole]) == everything
    check_resumes(loader, whole, every=1 + 2 * bool(workers))
    keyed: Any = {"transform": key_of, "batch": 1}
    two, saved = read(MdsShards(packed), 2, steps=3, **keyed)
    three, _ = read(MdsShards(packed), 3, saved=saved, **keyed)
    assert flat(two + three) == everything


def key_of(sample: dict[str, Any]) -> int:
    return int(sample["a"])


def test_a_decompressed_shard_continues_a_compressed_one(packed: Path, folder: Path) -> None:
    """MosaicML Streaming may keep both files, and a checkpoint fits either."""
    names = MdsShards(packed).shards()
    row = json.loads((packed / "index.json").read_text())["shards"][2]
    raw = gzip.decompress((packed / row["zip_data"]["basename"]).read_bytes())
    (packed / row["raw_data"]["basename"]).write_bytes(raw)
    (packed / row["zip_data"]["basename"]).unlink()
    source = MdsShards(packed)
    assert source.shards() == names
    assert [sample["a"] for sample, _ in source.open(names[2], 1)] == [21, 22, 23]
    # A sampler may read any sample next, so it needs all of them decompressed.
    assert len(source) == 4 * len(KINDS)
    with pytest.raises(SpecError, match=r"shard\.00000\.mds\.br is compressed, .*session\.stream"):
        source[8]


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_damaged_compressed_shards_are_refused(packed: Path, number: int) -> None:
    index = json.loads((packed / "index.json").read_text())
    row = index["shards"][number]
    path = packed / row["zip_data"]["basename"]
    content = path.read_bytes()
    source = MdsShards(packed)
    name = source.shards()[number]
    path.write_bytes(content[:-1])
    said = f"has {len(content) - 1} bytes, and index.json says {len(content)}"
    with pytest.raises(SpecError, match=said):
        MdsShards(packed).shards()
    with pytest.raises(SpecError, match="when the launch began"):
        list(source.open(name, None))
    # Overwritten, with the size that the index says.
    path.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(SpecError, match=r"is damaged .* its sha1 is"):
        list(source.open(name, None))
    row["zip_data"]["hashes"] = {}
    (packed / "index.json").write_text(json.dumps(index))
    source = MdsShards(packed)
    for wrong in (bytes(len(content)), content[:20] + content[:-20]):
        path.write_bytes(wrong)
        with pytest.raises(SpecError, match="is damaged and cannot be unpacked"):
            list(source.open(name, None))
    path.write_bytes(content)
    for bytes_ in (row["raw_data"]["bytes"] - 1, row["raw_data"]["bytes"] + 1):
        row["raw_data"]["bytes"] = bytes_
        (packed / "index.json").write_text(json.dumps(index))
        other = MdsShards(packed)
        with pytest.raises(SpecError, match=f"bytes.*; expected {bytes_}"):
            list(other.open(other.shards()[number], None))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        MdsShards(packed).shards()
    with pytest.raises(SpecError, match="was deleted since the launch began"):
        list(source.open(name, None))


def test_a_compression_that_nothing_unpacks_is_refused(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "holdfast.trainer.streams.mds.find_spec",
        lambda name: None if name == "pyarrow" else find(name),
    )
    with pytest.raises(
        SpecError, match=r"br is compressed with br, which pyarrow unpacks; install"
    ):
        MdsShards(packed).shards()
    index = json.loads((packed / "index.json").read_text())
    index["shards"] = [row for row in index["shards"] if row["compression"] in ("bz2:5", "gz")]
    (packed / "index.json").write_text(json.dumps(index))
    assert numbers_of(MdsShards(packed)) == [10, 11, 12, 13, 20, 21, 22, 23]
    index["shards"][0]["compression"] = "lzma:3"
    (packed / "index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"lzma:3; expected one of br, bz2, gz, snappy, zstd"):
        MdsShards(packed).shards()


def test_indexes_that_cannot_be_read_are_refused(folder: Path) -> None:
    change(folder, zip_data={"basename": "../shard.00000.mds.zstd", "bytes": 1})
    with pytest.raises(SpecError, match="expected a file of its folder"):
        MdsShards(folder).shards()
    change(folder, format="jsonl", zip_data=None)
    with pytest.raises(SpecError, match="format jsonl 2; expected mds 2"):
        MdsShards(folder).shards()
    for file in ("../shard.00000.mds", "/shard.00000.mds"):
        change(folder, format="mds", raw_data={"basename": file, "bytes": 674})
        with pytest.raises(SpecError, match="expected a file of its folder"):
            MdsShards(folder).shards()
    rows = json.loads((WRITTEN / "index.json").read_text())["shards"]
    (folder / "index.json").write_text(json.dumps({"shards": [*rows, rows[0]]}))
    with pytest.raises(SpecError, match="names a shard twice"):
        MdsShards(folder).shards()
    (folder / "index.json").write_text("[]")
    with pytest.raises(SpecError, match="is not an index of MDS shards"):
        MdsShards(folder).shards()
    (folder / "index.json").unlink()
    with pytest.raises(FileNotFoundError):
        MdsShards(folder).shards()
    theirs = type("StreamingDataset", (), {"__module__": "streaming.base.dataset"})
    with pytest.raises(TypeError, match=r"StreamingDataset: .*pass it to session\.stream"):
        as_source(theirs())
