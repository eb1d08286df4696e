"""Seeds of the random numbers that a stream's data draws."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import torch

T = TypeVar("T")
# What `key_of` makes seeds for. The numbers must never change.
BLOCK, READ, TRANSFORM, COLLATE, OPEN = 0, 1, 2, 3, 4
_END: Final = object()


def key_of(kind: int, *numbers: int) -> int:
    """Return 64 bits that depend on `kind` and the numbers, the same in all versions."""
    text = ",".join(map(str, (kind, *numbers))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seed_all(key: int) -> None:
    """Seed the generators that a transform may use, without those of devices."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & ((1 << 63) - 1))


class SeededRead:
    """Calls `read`, and seeds the generators before each sample that it gives.

    For a shard that a resume reads from its start: it then draws the same numbers as before, even
    for an order that `read` draws before its first sample. Make it where the generators have the
    seed of the shard.
    """

    def __init__(self, read: Callable[..., Iterable[T]]) -> None:
        self.read, self._key = read, random.getrandbits(63)

    def __call__(self, *arguments: Any, **more: Any) -> Iterator[Any]:
        seed_all(key_of(OPEN, self._key))
        samples, number = iter(self.read(*arguments, **more)), 0
        while (sample := self._next(samples, number)) is not _END:
            yield sample
            number += 1

    def _next(self, samples: Iterator[Any], number: int) -> Any:
        seed_all(key_of(READ, self._key, number))
        return next(samples, _END)
