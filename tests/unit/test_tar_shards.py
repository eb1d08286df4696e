"""Tar shards: samples by key, positions in bytes, and damaged tars."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_streams import alone, check_resumes

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams import TarShards

LONG = "folder/" * 30
FILES = [
    ("__meta__/of_all.json", b""),
    ("a/one.TXT", b"1"),
    ("a/one.seg.png", b"p" * 700),
    ("a/two.txt", b"2"),
    ("no extension", b""),
    (f"{LONG}three.txt", b"3" * 512),
    ("ünï.txt", b""),
    ("a/one.txt", b"again"),
]
KEYS = ["a/one", "a/two", f"{LONG}three", "ünï", "a/one"]


def write(path: Path, files: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    """Write a tar of files, and of a folder and a link before them."""
    with tarfile.open(path, "w", format=form) as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            member = tarfile.TarInfo(f"folder{kind!r}.txt")
            member.type = kind
            tar.addfile(member)
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def read(source: TarShards, position: Any = None) -> list[tuple[Any, Any]]:
    (name,) = source.shards()
    return list(source.open(name, position))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("kind", ["plain", "gzip", "url"])
def test_files_of_one_key_are_a_sample_and_each_position_is_found_again(
    tmp_path: Path, form: int, kind: str
) -> None:
    path = write(tmp_path / "0.tar", FILES, form)
    if kind == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    source = TarShards([f"file://{path}" if kind == "url" else path])
    pairs = read(source)
    assert [sample["__key__"] for sample, _ in pairs] == KEYS
    assert pairs[0][0]["seg.png"] == b"p" * 700
    assert {sample["__url__"] for sample, _ in pairs} == {source._paths[0]}
    assert [sample.get("txt") for sample, _ in pairs] == [b"1", b"2", b"3" * 512, b"", b"again"]
    for number, (_, position) in enumerate(pairs, 1):
        assert read(source, position) == pairs[number:]


def test_a_resume_reads_only_what_follows(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", [(f"{n}.txt", b"x" * 600) for n in range(40)])
    source = TarShards([path])
    pairs = read(source)
    content = bytearray(path.read_bytes())
    # What was read before the position is not read again.
    content[512 : pairs[29][1]] = b"\xff" * (pairs[29][1] - 512)
    path.write_bytes(content)
    assert read(source, pairs[29][1]) == pairs[30:]


def test_a_stream_of_tars_continues_at_any_step(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{n}.tar", [(f"{n}-{k}.txt", b"") for k in range(size)])
        for n, size in enumerate((9, 14, 5, 11))
    ]

    def loader() -> Any:
        keyed = {"transform": lambda sample: (sample["__key__"], random.random())}
        return alone(TarShards(paths), shuffle=True, buffer=4, batch=3, open_shards=2, **keyed)

    whole = list(loader())
    assert len({key for batch in whole for key, _ in batch}) == 39
    check_resumes(loader, whole)


def test_a_damaged_tar_is_refused_and_not_taken_for_a_short_one(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", [(f"{n}.txt", b"x" * 600) for n in range(20)])
    content = path.read_bytes()
    pairs = read(TarShards([path]))
    # A byte in the header of the eleventh sample.
    at = pairs[9][1]
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(SpecError, match=f"damaged at byte {at}, or a second tar"):
        read(TarShards([path]))
    # Two tars, of which tarfile reads the first.
    path.write_bytes(content + content)
    with pytest.raises(SpecError, match="a second tar was appended"):
        read(TarShards([path]))
    write(path, [("a.txt", b""), ("a.TXT", b"")])
    with pytest.raises(SpecError, match=r"two files a\.TXT at byte"):
        read(TarShards([path]))


def test_a_tar_that_was_cut_off_is_refused_before_the_first_step(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", [(f"{n}.txt", b"x" * 600) for n in range(20)])
    content = path.read_bytes()
    border = read(TarShards([path]))[9][1]
    for size in (border, border + 700, 1):
        path.write_bytes(content[:size])
        with pytest.raises(SpecError, match=r"was cut off|is not a tar"):
            TarShards([path]).shards()
    # A shard that the check did not reach is checked when it is read.
    for size, problem in ((border, "was cut off"), (border + 700, "cannot be read at byte")):
        path.write_bytes(content[:size])
        with pytest.raises(SpecError, match=problem):
            list(TarShards([path]).open(f"{path} ({size} bytes)", None))
    path.write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(SpecError, match="cannot be read at byte"):
        read(TarShards([path]))
    path.write_text("text\n" * 300)
    with pytest.raises(SpecError, match="is not a tar"):
        TarShards([path]).shards()


def test_a_tar_that_changes_or_vanishes_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", [("a.txt", b"")])
    source = TarShards([path])
    (name,) = source.shards()
    write(path, [("a.txt", b"x" * 20_000)])
    with pytest.raises(SpecError, match=r"and had 10240 when the launch began"):
        list(source.open(name, None))
    assert source.shards() != [name]
    path.unlink()
    with pytest.raises(SpecError, match=r"was deleted since the launch began"):
        list(source.open(name, None))
    with pytest.raises(FileNotFoundError):
        source.shards()


def test_a_tar_without_files_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    tarfile.open(path, "w").close()
    assert read(TarShards([path])) == []
