"""Reads and writes past the page cache: the same bytes on every disk, cached or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.contracts.disk.direct import ALIGNMENT, DIRECT_BYTES_MIN, DirectFile
from holdfast.trainer.loading.past_cache import (
    fill_aligned,
    go_past_cache,
    huge_memory,
    is_in_memory,
)

SIZE = 2 * DIRECT_BYTES_MIN + 5


@pytest.fixture
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def handle(tmp_path: Path, content: bytes) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(content)
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    yield opened
    os.close(opened)


def is_direct(handle: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{handle}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (ALIGNMENT, DIRECT_BYTES_MIN)])
def test_direct_and_cached_reads_return_the_bytes_of_the_file(
    handle: int, content: bytes, start: int, size: int, cold: bool
) -> None:
    """Also to an end inside a page, and nothing is written after the last page."""
    if cold:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        os.pread(handle, SIZE, 0)
        assert is_in_memory(handle, start, size)
    was_in_memory = is_in_memory(handle, start, size)
    went = go_past_cache(handle, start, size)
    # False where the file system has no direct reads.
    assert went == is_direct(handle)
    assert not (went and was_in_memory)
    memory = huge_memory(SIZE + 2 * ALIGNMENT)
    memory[size + ALIGNMENT :] = b"." * (len(memory) - size - ALIGNMENT)
    fill_aligned(handle, memory, start, size)
    assert memory[:size] == content[start : start + size]
    assert set(memory[size + ALIGNMENT :]) == {ord(".")}


def test_short_and_unaligned_ranges_go_through_the_cache(handle: int) -> None:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not go_past_cache(handle, 0, DIRECT_BYTES_MIN - 1)
    assert not go_past_cache(handle, 1, DIRECT_BYTES_MIN)
    assert not is_direct(handle)


def test_a_direct_read_that_is_refused_goes_through_the_cache(
    handle: int, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk requires another alignment."""
    read = os.preadv

    def refusing(opened: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(opened):
            raise OSError(22, "Invalid argument")
        return read(opened, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    go_past_cache(handle, 0, SIZE)
    memory = huge_memory(SIZE + ALIGNMENT)
    fill_aligned(handle, memory, 0, SIZE)
    assert memory[:SIZE] == content
    assert not is_direct(handle)


def test_a_file_that_ends_early_is_an_error(handle: int) -> None:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    go_past_cache(handle, 0, SIZE)
    memory = huge_memory(SIZE + 2 * ALIGNMENT)
    with pytest.raises(EOFError, match="expected more"):
        fill_aligned(handle, memory, 0, SIZE + 1)


@pytest.mark.parametrize("first", [0, 1])
def test_an_output_writes_all_bytes_to_the_file(tmp_path: Path, first: int) -> None:
    """In pieces, the last of which ends inside a page; also from unaligned memory."""
    memory = huge_memory(SIZE + 1)
    memory[:] = os.urandom(len(memory))
    content = memory[first : first + SIZE]
    opened = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    try:
        output = DirectFile(opened, SIZE)
        for start in range(0, SIZE, DIRECT_BYTES_MIN):
            output.write(content[start : start + DIRECT_BYTES_MIN])
        assert not is_direct(opened)
        os.fsync(opened)
    finally:
        os.close(opened)
    assert (tmp_path / "written").read_bytes() == content


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, content = os.write, huge_memory(SIZE)
    content[:] = os.urandom(SIZE)
    lengths: list[int] = []

    def short(opened: int, piece: memoryview) -> int:
        # As a signal or a nearly full disk may cause.
        lengths.append(write(opened, piece[: 2 * ALIGNMENT + 7 * (len(lengths) == 3)]))
        return lengths[-1]

    opened = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    try:
        monkeypatch.setattr(os, "write", short)
        DirectFile(opened, SIZE).write(content)
    finally:
        monkeypatch.undo()
        os.close(opened)
    assert len(lengths) > SIZE // (3 * ALIGNMENT)
    assert (tmp_path / "written").read_bytes() == content
