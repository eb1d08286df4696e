"""Digests: of commands and specs (SHA-256, for identity) and of files (XXH3, for damage)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

FILE_CHECKSUM = "xxh3_128"
READ_BYTES_MAX = 8 * 1024 * 1024


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal documents give equal bytes."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
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


def new_checksum() -> xxhash.xxh3_128:
    """A running file checksum (XXH3, 128 bits): `update(bytes)`, then `hexdigest()`."""
    return xxhash.xxh3_128()


def file_checksum(path: Path) -> str:
    """The checksum of a whole file, read in pieces of `READ_BYTES_MAX` bytes."""
    digest = new_checksum()
    with open(path, "rb", buffering=0) as stream:
        buffer = bytearray(READ_BYTES_MAX)
        view = memoryview(buffer)
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
