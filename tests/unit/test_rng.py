"""Noted states of the random generators are those of the moment, whatever was drawn or set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from holdfast.trainer.state import rng

# Each changes the state. A normal number is drawn with a second one, which is kept for the next.
CHANGES: list[tuple[str, Callable[[], object]]] = [
    ("python random", random.random),
    ("python first of a normal pair", lambda: random.gauss(0, 1)),
    ("python second of a normal pair", lambda: random.gauss(0, 1)),
    ("python seed", lambda: random.seed(4)),
    ("python seed, which leaves the index as it is", lambda: random.seed(5)),
    ("python, as many numbers as there are words", lambda: random.getrandbits(32 * rng.MT_WORDS)),
    ("numpy uniform", np.random.rand),
    ("numpy first of a normal pair", np.random.standard_normal),
    ("numpy second of a normal pair", np.random.standard_normal),
    ("numpy shuffle", lambda: np.random.permutation(3)),
    ("numpy seed", lambda: np.random.seed(4)),
    ("numpy, as many numbers as there are words", lambda: np.random.bytes(4 * rng.MT_WORDS)),
    ("torch", lambda: torch.rand(1)),
]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = rng.capture()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield
    rng.restore(before)


def states() -> dict[str, object]:
    """The states as the generators themselves give them."""
    kind, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
    }


def test_noted_states_are_those_of_the_moment() -> None:
    for name, change in CHANGES:
        former = rng.note()
        change()
        noted = rng.note()
        found = {
            "python": noted.python,
            "numpy": (
                noted.numpy["bit_generator"],
                noted.numpy["state"]["key"].tolist(),
                noted.numpy["state"]["pos"],
                noted.numpy["has_gauss"],
                noted.numpy["gauss"],
            ),
            "torch": noted.torch.tolist(),
        }
        assert found == states(), name
        assert str(found) != str(rng.as_tensors(former)), name


def test_state_that_differs_only_in_a_kept_normal_number_is_noted() -> None:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    rng.note()
    np.random.set_state({**state, "has_gauss": 1, "gauss": 0.25})
    noted = rng.note().numpy
    assert (noted["has_gauss"], noted["gauss"]) == (1, 0.25)
    version, numbers, _ = random.getstate()
    rng.note()
    random.setstate((version, numbers, 0.5))
    assert rng.note().python[2] == 0.5


def test_unchanged_generators_are_not_read_again() -> None:
    """A loader notes the states for each batch, and reading one takes as long as a short step."""
    first, second = rng.note(), rng.note()
    assert second.python is first.python
    assert second.numpy is first.numpy


def test_another_bit_generator_is_always_read() -> None:
    owner = mtrand._rand
    kept = owner._bit_generator
    rng.note()
    mtrand.set_bit_generator(np.random.MT19937(5))
    try:
        expected = np.random.get_state(legacy=False)
        assert str(rng.note().numpy) == str(expected)
    finally:
        mtrand.set_bit_generator(kept)


def test_generator_that_was_not_used_is_not_read_again() -> None:
    first, second = rng.note(), rng.note()
    assert first.python is second.python
    assert first.numpy is second.numpy


def test_state_that_was_set_by_hand_is_noted_if_one_word_differs() -> None:
    rng.note()
    version, numbers, gauss = random.getstate()
    words = list(numbers)
    words[300] ^= 1
    random.setstate((version, tuple(words), gauss))
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    state["state"]["key"][300] ^= 1
    np.random.set_state(state)
    noted = rng.note()
    assert noted.python == random.getstate()
    assert noted.numpy["state"]["key"].tolist() == state["state"]["key"].tolist()
