"""The random number generators of one rank as tensors: Python, NumPy, torch on each device.

Each rank saves its own state, so that a resume at the same world size draws the numbers of an
uninterrupted run. A rank without saved state is seeded from (seed, rank, step).
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.trainer.data.order import ids_at
from holdfast.trainer.process import devices

PYTHON: Final = "python"
NUMPY: Final = "numpy"
TORCH: Final = "torch"
# Loaders whose iterators may be created before the first step: one to train, one to evaluate.
LOADERS_MAX: Final = 2
MT_WORDS: Final = 624
SEEDS: Final = 1 << 62
State = TypeVar("State")


class NotedGenerators(NamedTuple):
    """The states of the generators that a dataset may use in this process, as they give them.

    A loader notes them for each batch, so that must cost less than a draw.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor


def note() -> NotedGenerators:
    """Return the current states of Python's, NumPy's and torch's generators on the CPU."""
    return NotedGenerators(_read_python(), _read_numpy(), torch.default_generator.get_state())


def is_equal(one: NotedGenerators, other: NotedGenerators) -> bool:
    """Return True if two notes have the same states, so nothing was drawn between them."""
    found = as_tensors(other)
    return all(torch.equal(state, found[kind]) for kind, state in as_tensors(one).items())


class _Reader(Generic[State]):
    """Reads a generator's state, and only again when the generator's memory has changed.

    A state has 624 words, each of which becomes an object of Python. That takes a hundred times as
    long as a copy of the memory. `memory` returns the bytes that determine the state, or None if
    they are not known.
    """

    def __init__(self, read: Callable[[], State], memory: Callable[[], object]) -> None:
        self._read, self._memory = read, memory
        self._known: tuple[object, State] | None = None

    def __call__(self) -> State:
        memory = self._memory()
        # Equal memory means equal state. Comparing 2,500 bytes is cheaper than making 624 numbers,
        # see decision 83.
        if self._known is None or memory is None or memory != self._known[0]:
            self._known = memory, self._read()
        return self._known[1]


def _python_memory() -> object:
    """The words are in the object itself, the second number of a normal pair in an attribute."""
    generator = random.random.__self__  # type: ignore[attr-defined]
    return _memory_of(generator).tobytes(), generator.gauss_next


def _numpy_memory() -> object:
    """The words are in the bit generator, the second number of a normal pair in its owner."""
    owner = np.random.mtrand._rand
    generator = owner._bit_generator
    # The program has installed another bit generator, whose memory is unknown.
    if type(generator) is not np.random.MT19937:
        return None
    return _memory_of(owner).tobytes(), _memory_of(generator).tobytes()


@functools.lru_cache(maxsize=4)
def _memory_of(item: object) -> memoryview:
    """Return the memory of an object of C after its reference count and its type.

    The cache keeps the object. Without it, the memory could later be that of another one.
    """
    start = object.__basicsize__
    # After the reference count, which changes without any draw.
    memory = ctypes.c_char * (type(item).__basicsize__ - start)
    return memoryview(memory.from_address(id(item) + start))


def _numpy_state_now() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return state


_read_python: Final = _Reader(random.getstate, _python_memory)
_read_numpy: Final = _Reader(_numpy_state_now, _numpy_memory)


def as_tensors(noted: NotedGenerators) -> dict[str, torch.Tensor]:
    """Return noted states in the form of `capture`, without those of devices."""
    return {
        PYTHON: _python_tensor(noted.python),
        NUMPY: _numpy_tensor(noted.numpy),
        TORCH: noted.torch,
    }


def capture() -> dict[str, torch.Tensor]:
    """Return the states by generator: int64 for Python (628,) and NumPy (627,), uint8 for torch.

    Those of an accelerator are included if it is in use, under its type, with a row per device.
    """
    return as_tensors(note()) | devices.generator_states()


def empty_like_saved(
    kinds: Iterable[str], shape_of: Callable[[str], Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Return tensors to load saved states of `kinds` into.

    `shape_of` returns the saved shape of the states of an accelerator, by its kind.
    """
    shapes = {PYTHON: (MT_WORDS + 4,), NUMPY: (MT_WORDS + 3,), TORCH: torch.get_rng_state().shape}
    return {
        kind: torch.zeros(
            list(shapes.get(kind) or shape_of(kind)),
            dtype=torch.int64 if kind in {PYTHON, NUMPY} else torch.uint8,
            device=devices.CPU,
        )
        for kind in kinds
    }


def restore(states: Mapping[str, torch.Tensor]) -> None:
    """Set every generator in `states` to its state. Other generators stay unchanged."""
    if PYTHON in states:
        version, *words, has_gauss, bits = states[PYTHON].tolist()
        gauss = struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None
        random.setstate((version, tuple(words), gauss))
    if NUMPY in states:
        *keys, at, has_gauss, bits = states[NUMPY].tolist()
        cached = struct.unpack("<d", struct.pack("<q", bits))[0]
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), at, has_gauss, cached))
    if TORCH in states:
        torch.set_rng_state(states[TORCH].cpu())
    devices.set_generator_states(states)


def used_since(states: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the generators that were used since `states` were captured.

    The seeds that the iterators of a few loaders draw from torch's generator do not count.
    """
    now = capture()
    used = [kind for kind, saved in states.items() if not _is_same(now.get(kind), saved)]
    if TORCH in used:
        probe = torch.Generator(devices.CPU)
        probe.set_state(states[TORCH].cpu())
        # The iterators draw one seed each from torch's generator, which an uninterrupted run does
        # not.
        for _ in range(LOADERS_MAX):
            torch.empty((), dtype=torch.int64, device=devices.CPU).random_(generator=probe)
            if torch.equal(probe.get_state(), now[TORCH]):
                used.remove(TORCH)
                break
    return used


class ResumedGenerators:
    """The random generators as a resume left them, for a program that draws before it trains.

    An uninterrupted run does not draw the numbers that a program draws between a resume and its
    first step, as a loader's iterator does.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] | None = None

    def note(self) -> None:
        """Record the state of the generators right after the resume."""
        self._states = capture()

    def rewind(self, *, is_last: bool) -> list[str]:
        """Restore the recorded state, until `is_last`.

        Returns the generators that were used for more than the seeds of loaders.
        """
        if self._states is None:
            return []
        used = used_since(self._states)
        restore(self._states)
        self._states = None if is_last else self._states
        return used

    def rewind_seeds(self) -> None:
        """Take back the seeds that loaders' iterators drew, if nothing else was drawn."""
        # If anything else was drawn, the program did so on purpose, and its draws stay.
        if self._states is not None and not used_since(self._states):
            restore(self._states)


def _is_same(now: torch.Tensor | None, saved: torch.Tensor) -> bool:
    return now is None or torch.equal(now, saved.cpu())


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed every generator from (seed, rank, step), with the same result on every machine."""
    # A keyed permutation of a large set serves as the hash, so ranks get distinct seeds.
    drawn = int(ids_at(rank + step * (1 << 24), 1, SEEDS, seed)[0])
    random.seed(drawn)
    np.random.seed(drawn & 0xFFFFFFFF)
    torch.manual_seed(drawn)


def _python_state(state: tuple[Any, ...]) -> torch.Tensor:
    version, words, gauss = state
    bits = struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]
    words = [version, *words, int(gauss is not None), bits]
    return torch.tensor(words, dtype=torch.int64, device=devices.CPU)


def _numpy_state(state: dict[str, Any]) -> torch.Tensor:
    bits = struct.unpack("<q", struct.pack("<d", state["gauss"]))[0]
    words = [*state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"], bits]
    return torch.tensor(words, dtype=torch.int64, device=devices.CPU)


class _LastTensor(Generic[State]):
    """Converts a state, and keeps the tensor: most programs never draw from these generators."""

    def __init__(self, convert: Callable[[State], torch.Tensor]) -> None:
        self._convert = convert
        self._last: tuple[State, torch.Tensor] | None = None

    def __call__(self, state: State) -> torch.Tensor:
        # `_Reader` returns the same object while the generator has not changed.
        if self._last is None or self._last[0] is not state:
            self._last = state, self._convert(state)
        return self._last[1]


_python_tensor: Final = _LastTensor(_python_state)
_numpy_tensor: Final = _LastTensor(_numpy_state)
