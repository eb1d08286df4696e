"""Reading past the page cache: the same bytes, wherever they are and whatever the disk can do."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.trainer.loading.past_cache import (
    ALIGNMENT,
    DIRECT_BYTES_MIN,
    fill_aligned,
    go_past_cache,
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
def test_the_bytes_are_the_file_s(
    handle: int, content: bytes, start: int, size: int, cold: bool
) -> None:
    """Cold or not, to an end that is no page's too, and nothing is written behind the last page."""
    if cold:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        os.pread(handle, SIZE, 0)
        assert is_in_memory(handle, start, size)
    was_in_memory = is_in_memory(handle, start, size)
    went = go_past_cache(handle, start, size)
    # Where the file system has no direct reads, none are promised.
    assert went == is_direct(handle)
    assert not (went and was_in_memory)
    memory = memoryview(mmap.mmap(-1, SIZE + 2 * ALIGNMENT))
    memory[size + ALIGNMENT :] = b"." * (len(memory) - size - ALIGNMENT)
    fill_aligned(handle, memory, start, size)
    assert memory[:size] == content[start : start + size]
    assert set(memory[size + ALIGNMENT :]) == {ord(".")}


def test_a_short_range_and_one_within_a_page_go_through_the_cache(handle: int) -> None:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not go_past_cache(handle, 0, DIRECT_BYTES_MIN - 1)
    assert not go_past_cache(handle, 1, DIRECT_BYTES_MIN)
    assert not is_direct(handle)


def test_a_direct_read_that_is_refused_goes_through_the_cache(
    handle: int, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk asks for other multiples than we took."""
    read = os.preadv

    def refusing(opened: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(opened):
            raise OSError(22, "Invalid argument")
        return read(opened, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    go_past_cache(handle, 0, SIZE)
    memory = memoryview(mmap.mmap(-1, SIZE + ALIGNMENT))
    fill_aligned(handle, memory, 0, SIZE)
    assert memory[:SIZE] == content
    assert not is_direct(handle)


def test_a_file_that_ends_early_is_an_error(handle: int) -> None:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    go_past_cache(handle, 0, SIZE)
    memory = memoryview(mmap.mmap(-1, SIZE + 2 * ALIGNMENT))
    with pytest.raises(EOFError, match="expected more"):
        fill_aligned(handle, memory, 0, SIZE + 1)
