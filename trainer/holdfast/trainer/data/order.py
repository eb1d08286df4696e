"""Data order: the samples of each training step, as a pure function without the rank count.

An endless sequence visits every sample once per epoch, in a different order in each epoch. The
samples of step s, counted from 1, begin at position (s - 1) * global_batch. If the global batch
changes, the steps since then continue from the position that was reached. A rank takes its slice of
the step's samples, so two ranks together see the same samples as four.

The order of an epoch is a keyed permutation, computed only for the requested positions. No data of
the dataset's size is held, and position p costs the same for any p. It is a balanced Feistel cipher
on the next even number of bits, restricted to range(n) by cycle walking: Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002. Its round function is the finaliser of
SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
The order is a promise: it never changes between versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.contracts.errors import SpecError

Ids: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

ROUNDS: Final = 8
SAMPLES_MAX: Final = 1 << 62
SIZES_NAMED_MAX: Final = 2
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True)
class SkipWindow:
    """Skip the data of `steps` steps from step `first_step` on, at every rank count."""

    first_step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """The order of one dataset under one global batch. Frozen, and the same on all ranks."""

    samples: int
    global_batch: int
    seed: int = 0
    skips: tuple[SkipWindow, ...] = field(default=())
    # The first step of this global batch, and the position of its samples.
    since: tuple[int, int] = (1, 0)

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= SAMPLES_MAX:
            raise SpecError(f"a dataset of {self.samples} samples: expected 1 to {SAMPLES_MAX}")
        if self.global_batch < 1:
            raise SpecError(f"a global batch of {self.global_batch}: expected 1 or more")

    def position(self, step: int) -> int:
        """The number of samples before step `step`, counted from 1, including skip windows."""
        first, position = self.since
        skipped = sum(w.steps for w in self.skips if first <= w.first_step <= step)
        return max(0, position + (step - first + skipped) * self.global_batch)

    def changed_at(self, step: int, global_batch: int) -> DataOrder:
        """Return the order that continues with another global batch from `step` on."""
        # Data that is skipped from `step` on is skipped in the new order.
        before = replace(self, skips=tuple(w for w in self.skips if w.first_step < step))
        since = (step, before.position(step))
        return replace(self, global_batch=global_batch, since=since)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of the first sample of step `step`."""
        return self.position(step) // self.samples

    def step_ids(self, step: int) -> Ids:
        """Return the sample ids of step `step`, shape (global_batch,), int64 in range(samples)."""
        start = self.position(step)
        return ids_at(start, self.global_batch, self.samples, self.seed)

    def rank_ids(self, step: int, rank: int, world_size: int) -> Ids:
        """Return one rank's slice of `step_ids`, shape (global_batch // world_size,), int64.

        Raises `SpecError` if the global batch does not split evenly over the ranks.
        """
        share = local_batch(self.global_batch, world_size)
        start = self.position(step) + rank * share
        return ids_at(start, share, self.samples, self.seed)

    def rank_ids_of(self, steps: range, rank: int, world_size: int) -> Ids:
        """Return `rank_ids` of several steps, shape (len(steps), global_batch // world_size).

        For few ids, this takes as long as for one step.
        """
        share = local_batch(self.global_batch, world_size)
        starts = [divmod(self.position(step) + rank * share, self.samples) for step in steps]
        epochs = np.array([[epoch] for epoch, _ in starts], dtype=np.uint64)
        offsets = np.array([[offset] for _, offset in starts], dtype=np.uint64)
        further, places = np.divmod(
            offsets + np.arange(share, dtype=np.uint64), np.uint64(self.samples)
        )
        found = np.empty(places.shape, dtype=np.int64)
        for epoch in np.unique(epochs + further).tolist():
            is_in = epochs + further == epoch
            found[is_in] = permute(places[is_in], self.samples, self.seed, epoch).astype(np.int64)
        return found


class Batch(np.ndarray[Any, np.dtype[np.int64]]):
    """A rank's sample ids of one step, shape (local_batch,), int64."""

    def micro(self, samples_max: int) -> list[Ids]:
        """Split the ids into equal parts of at most `samples_max`, for gradient accumulation.

        Scale each part's mean loss by 1 / len(parts). The sum of the gradients then equals that of
        the whole batch at any number of ranks. Raises `SpecError` if `samples_max` is below 1.
        """
        parts = micro_parts(len(self), samples_max)
        return [np.asarray(part) for part in np.split(self, parts)]


def local_batch(global_batch: int, world_size: int) -> int:
    """Return the samples per rank and step. Raises `SpecError` with sizes that would work."""
    share, rest = divmod(global_batch, world_size)
    if rest == 0 and share > 0:
        return share
    sizes = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    near = sorted(sizes, key=lambda size: abs(size - world_size))[: SIZES_NAMED_MAX + 1]
    batches = sorted({max(share, 1) * world_size, (share + 1) * world_size})
    raise SpecError(
        f"a global batch of {global_batch} does not split evenly over {world_size} ranks; "
        f"run on {_listing(sorted(near))} ranks, or choose a global batch of {_listing(batches)}"
    )


def micro_parts(samples: int, samples_max: int) -> int:
    """Return the fewest equal parts of `samples` with at most `samples_max` in each."""
    if samples_max < 1:
        raise SpecError(f"micro-batches of {samples_max} samples: expected 1 or more")
    at_least = -(-samples // samples_max)
    return next(parts for parts in range(max(at_least, 1), samples + 1) if samples % parts == 0)


def ids_at(start: int, count: int, samples: int, seed: int) -> Ids:
    """Return ids at positions `start` to `start + count - 1` of the endless sequence, int64."""
    found = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, offset = divmod(start + done, samples)
        run = min(count - done, samples - offset)
        places = np.arange(offset, offset + run, dtype=np.uint64)
        found[done : done + run] = permute(places, samples, seed, epoch).astype(np.int64)
        done += run
    return found


def permute(places: _Words, samples: int, seed: int, epoch: int) -> _Words:
    """Return the image of `places` under the permutation of range(samples) for (seed, epoch).

    `places` is uint64 of any shape, with values below `samples`. The result has the same shape.
    """
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    walked = _encrypt(places, half, keys)
    limit = np.uint64(samples)
    # The cipher permutes 4 ** half places, which is below 4 * samples except for the smallest sets.
    # A place outside range(samples) moves on along its cycle. The cycle began inside the range, so
    # it leads back inside. The walk takes at most 4 ** half rounds, and about 4 on average.
    for _ in range(4**half):
        outside = walked >= limit
        if not outside.any():
            break
        walked[outside] = _encrypt(walked[outside], half, keys)
    return walked


def parse_skips(value: Iterable[Any]) -> tuple[SkipWindow, ...]:
    """Return skip windows from JSON pairs [first_step, steps], sorted and without duplicates."""
    return tuple(SkipWindow(*pair) for pair in sorted({(int(a), int(b)) for a, b in value}))


def joined(skips: Iterable[SkipWindow], pairs: Iterable[Any]) -> tuple[SkipWindow, ...]:
    """Return windows and pairs [first_step, steps] together, without duplicates."""
    return parse_skips([*((w.first_step, w.steps) for w in skips), *pairs])


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = _mix_int((seed & _MASK) ^ _mix_int(epoch + _GOLDEN))
    return [_mix_int(state + number * _GOLDEN) for number in range(1, ROUNDS + 1)]


def _encrypt(places: _Words, half: int, keys: list[int]) -> _Words:
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = places >> shift, places & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    joined: _Words = (left << shift) | right
    return joined


def _mix(words: _Words) -> _Words:
    """Apply the SplitMix64 finaliser to arrays. The uint64 products wrap as intended."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed


def _mix_int(word: int) -> int:
    """Apply the same function to one Python integer, modulo 2 ** 64."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _listing(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
