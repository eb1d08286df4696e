"""Seeds of what a shard's reader draws: the same after a resume, and few where it draws nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import datasets
import numpy as np
import pytest
import torch
from tests.unit.test_streams import alone, check_resumes

from holdfast.trainer.streams import Counted
from holdfast.trainer.streams.convert import as_source
from holdfast.trainer.streams.loader import StreamLoader
from holdfast.trainer.streams.seeds import BLOCK_MAX

SAMPLES, FAR = 3 * BLOCK_MAX, 3 * BLOCK_MAX - 2


def drawing(draw: Callable[[], float], is_due: Callable[[int], bool]) -> Callable[[str], Any]:
    """Return a reader whose samples depend on all that it has drawn so far."""

    def read(_: str) -> Iterator[float]:
        drawn = 0.0
        for number in range(SAMPLES):
            drawn += draw() if is_due(number) else 0.0
            yield number + drawn

    return read


def seeding() -> float:
    random.seed(3)
    return random.random()


DRAWS: Final[dict[str, tuple[Callable[[], float], Callable[[int], bool]]]] = {
    "nothing": (random.random, lambda number: False),
    "at the first sample": (random.random, lambda number: number == 0),
    "at the second": (np.random.rand, lambda number: number == 1),
    "at the last that is left out": (lambda: torch.rand(()).item(), lambda number: number == FAR),
    "one normal number": (np.random.randn, lambda number: number == BLOCK_MAX),
    "of each block": (random.random, lambda number: number % 500 == 7),
    "of each sample": (random.random, lambda number: True),
    "of each sample by torch": (lambda: torch.randn(()).item(), lambda number: True),
    "with a seed of its own": (seeding, lambda number: number == 99),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_a_reader_drew_before_its_position_is_drawn_again(kind: str) -> None:
    source = Counted(["0"], drawing(*DRAWS[kind]))

    def rest(position: int | None) -> list[tuple[float, int]]:
        random.seed(11)
        return list(source.open_seeded("0", position))

    whole = rest(None)
    assert len(whole) == SAMPLES
    for position in (1, 2, 3, BLOCK_MAX, BLOCK_MAX + 1, FAR, FAR + 1, SAMPLES, SAMPLES + 1):
        assert rest(position) == whole[position:]


class Seen:
    """Reads numbers, and notes how often it was called and each seed that it found."""

    def __init__(self) -> None:
        self.calls, self.seeds = 0, set[int]()

    def __call__(self, _: str) -> Iterator[int]:
        self.calls += 1
        for number in range(SAMPLES):
            self.seeds.add(torch.initial_seed())
            yield number


def test_samples_that_a_resume_leaves_out_get_no_seed_if_the_reader_draws_nothing() -> None:
    read = Seen()
    ((sample, position), *_) = islice(Counted(["0"], read).open_seeded("0", FAR), 1)
    assert (sample, position, read.calls) == (FAR, FAR + 1, 1)
    # The first one, and the one that is given.
    assert len(read.seeds) == 2


def test_a_reader_that_draws_is_called_a_second_time_only() -> None:
    calls = []

    def read(name: str) -> Iterator[float]:
        calls.append(name)
        return (random.random() for _ in range(SAMPLES))

    next(Counted(["0"], read).open_seeded("0", FAR))
    assert calls == ["0", "0"]


def numbers(files: list[str], seen: Seen) -> Iterator[dict[str, float]]:
    for name in files:
        first = random.random()
        yield from ({"n": first + number} for number in seen(name))


def test_a_generator_of_datasets_gets_few_seeds_and_draws_the_same() -> None:
    def loader(seen: Seen) -> StreamLoader:
        given: Any = {"files": ["0", "1"], "seen": seen}
        made: Any = datasets.IterableDataset.from_generator(numbers, gen_kwargs=given)
        return alone(as_source(made.map(dict)), batch=BLOCK_MAX - 1, num_workers=0)

    whole = list(loader(Seen()))
    begun = loader(Seen())
    given = list(islice(begun, 2))
    seen = Seen()
    resumed = loader(seen)
    resumed.resume(begun.facts(), [begun.state_dict()])
    given.append(next(iter(resumed)))
    # The shard has one more batch, a sample of which was read for the next one.
    assert len(seen.seeds) <= BLOCK_MAX + 2
    assert given + list(resumed) == whole


def test_a_shard_without_samples_and_one_that_became_shorter_give_no_rest() -> None:
    for samples in (0, 1, 5):
        source = Counted(["0"], lambda _, samples=samples: range(samples))  # type: ignore[misc]
        assert list(source.open_seeded("0", 5)) == list(source.open("0", 5)) == []
        assert [sample for sample, _ in source.open("0", None)] == list(range(samples))


def test_a_reader_that_fails_in_a_sample_that_is_left_out_raises() -> None:
    def read(_: str) -> Iterator[int]:
        yield from range(9)
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        list(Counted(["0"], read).open_seeded("0", 100))


def test_blocks_of_a_reader_that_draws_late_continue() -> None:
    def loader() -> StreamLoader:
        source = Counted(["0"], drawing(random.random, lambda number: number == 2 * BLOCK_MAX))
        return alone(source, batch=BLOCK_MAX, shuffle=True, buffer=500)

    check_resumes(loader, list(loader()))
