"""Seeds of the random numbers that a stream's data draws."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any, Final, TypeVar

import numpy as np
import torch

from holdfast.trainer.state import rng

T = TypeVar("T")
# What `key_of` makes seeds for. The numbers must never change.
BLOCK, READ, TRANSFORM, COLLATE, OPEN = 0, 1, 2, 3, 4
# Samples that are read between two looks at the generators.
BLOCK_MAX: Final = 1024
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


def _from_the_start() -> int:
    return 0


class SeededRead:
    """Calls `read`, and seeds the generators before each sample that it gives.

    For a shard that a resume reads from its start: it then draws the same numbers as before, even
    for an order that `read` draws before its first sample. Make it where the generators have the
    seed of the shard.

    `first` returns how many samples the caller leaves out. In their place, it gets that many times
    None. Seeds take longer than most readers do, so these samples are read without seeds, except
    the first one. The states of the generators are compared after each block of them. If one has
    changed, `read` draws random numbers, and is called again, with a seed for each sample.
    """

    def __init__(
        self, read: Callable[..., Iterable[T]], first: Callable[[], int] = _from_the_start
    ) -> None:
        self.read, self._first, self._key = read, first, random.getrandbits(63)

    def __call__(self, *arguments: Any, **more: Any) -> Iterator[Any]:
        first = self._first()
        samples = self._open(arguments, more)
        if not self._skipped(samples, first):
            samples = self._open(arguments, more)
            for number in range(first):
                self._next(samples, number)
        yield from repeat(None, first)
        number = first
        while (sample := self._next(samples, number)) is not _END:
            yield sample
            number += 1

    def _open(self, arguments: tuple[Any, ...], more: dict[str, Any]) -> Iterator[Any]:
        seed_all(key_of(OPEN, self._key))
        return iter(self.read(*arguments, **more))

    def _next(self, samples: Iterator[Any], number: int) -> Any:
        seed_all(key_of(READ, self._key, number))
        return next(samples, _END)

    def _skipped(self, samples: Iterator[Any], first: int) -> bool:
        """Read the first samples. Return False if one that got no seed drew random numbers."""
        if first:
            self._next(samples, 0)
        done, seen = 1, rng.note()
        while done < first:
            # Short blocks at first, so that little is read twice if each sample draws.
            size = min(done, first - done, BLOCK_MAX)
            deque(islice(samples, size), maxlen=0)
            if not rng.is_equal(seen, rng.note()):
                return False
            done += size
        return True
