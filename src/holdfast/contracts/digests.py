"""Digests: of commands and specs (SHA-256, for identity) and of files (XXH3, for damage).

A file longer than one block has a digest for each block, so that a part of it can be believed
without reading the rest; its checksum is then the digest of its blocks' digests.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

BLOCK_BYTES: Final = 4 * 1024 * 1024
BLOCKS_MAX: Final = 256
DIGEST_HEX: Final = 32
READ_BYTES_MAX: Final = 1024 * 1024

_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)

Content = bytes | bytearray | memoryview
RunningDigest = xxhash.xxh3_128


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal documents give equal bytes."""
    text = _CANONICAL.encode(document)
    # Arguments that are no UTF-8 hold lone surrogates; they stay distinct.
    return text.encode(errors="surrogatepass")


def document_digest(document: Any) -> str:
    """SHA-256 over `canonical_json(document)`, as 64 hexadecimal characters."""
    return hashlib.sha256(canonical_json(document)).hexdigest()


def command_digest(argv: Sequence[str], working_directory: str) -> str:
    """The identity of a program's command line: its own argv (torchrun's excluded) and directory.

    `argv` is as the program sees it in `sys.argv`, so the agent and rank 0 compute the same.
    """
    return document_digest({"argv": list(argv), "working_directory": working_directory})


def new_checksum() -> RunningDigest:
    """A running digest of bytes (XXH3, 128 bits): `update(bytes)`, then `hexdigest()`."""
    return RunningDigest()


def digest_of(content: Content) -> str:
    """The digest of `content` (XXH3, 128 bits), as `DIGEST_HEX` hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(content)


def block_bytes_of(size_bytes: int) -> int:
    """Bytes of a block of a file of `size_bytes`; 0 for one that is no longer than a block.

    Blocks double until `BLOCKS_MAX` of them hold the file, so a manifest stays small.
    """
    if size_bytes <= BLOCK_BYTES:
        return 0
    block_bytes = BLOCK_BYTES
    while size_bytes > block_bytes * BLOCKS_MAX:
        block_bytes *= 2
    return block_bytes


class FileChecksum:
    """The running checksum of a file whose size is known: one pass gives blocks and whole.

    `update` may be given the bytes in any pieces. `block_bytes` is 0 and `blocks` empty for a
    file of at most one block, whose `checksum` is the plain digest of its bytes.
    """

    def __init__(self, size_bytes: int) -> None:
        self.block_bytes = block_bytes_of(size_bytes)
        self._done: list[str] = []
        self._running = new_checksum()
        self._room = self.block_bytes

    def update(self, piece: Content) -> None:
        """Take the file's next bytes."""
        if not self.block_bytes:
            self._running.update(piece)
            return
        with memoryview(piece).cast("B") as view:
            at = 0
            while at < len(view):
                count = min(self._room, len(view) - at)
                self._running.update(view[at : at + count])
                at += count
                self._room -= count
                if not self._room:
                    self._end_block()

    def finish(self) -> tuple[str, str]:
        """(checksum, blocks) of what was given; to be called once, after the last byte."""
        if not self.block_bytes:
            return self._running.hexdigest(), ""
        if self._room < self.block_bytes:
            self._end_block()
        blocks = "".join(self._done)
        return checksum_of_blocks(blocks), blocks

    def _end_block(self) -> None:
        self._done.append(self._running.hexdigest())
        self._running.reset()
        self._room = self.block_bytes


def checksum_of_blocks(blocks: str) -> str:
    """The checksum of a file whose blocks have these digests, in hexadecimal, one after another."""
    return digest_of(bytes.fromhex(blocks))


def file_checksum(path: Path) -> str:
    """The checksum of a whole file, as its writer gives it."""
    running = FileChecksum(path.stat().st_size)
    with open(path, "rb", buffering=0) as stream:
        _feed(running, stream.fileno(), 0, path.stat().st_size)
    return running.finish()[0]


def range_digest(handle: int, start: int, size_bytes: int) -> str:
    """The digest of `size_bytes` bytes of an open file from `start`, or of as many as there are."""
    running = new_checksum()
    _feed(running, handle, start, size_bytes)
    return running.hexdigest()


def _feed(running: FileChecksum | RunningDigest, handle: int, start: int, size: int) -> None:
    """Read pieces that stay in the processor's cache, and take each into `running`."""
    buffer = memoryview(bytearray(min(size, READ_BYTES_MAX) or 1))
    at, end = start, start + size
    while at < end and (count := os.preadv(handle, [buffer[: end - at]], at)):
        running.update(buffer[:count])
        at += count
