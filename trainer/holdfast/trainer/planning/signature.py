"""What a plan depends on: the keys, types and shapes of a state, flattened as DCP names them.

Numbers, texts and lists of them have space to grow, so that later values fit the same plan.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import SaveError


class Encoded:
    """A value other than a number, a text or a list of them, as `torch.save` wrote it."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content


_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})
_USUAL: Final = frozenset({torch.Tensor, torch.nn.Parameter})
# Every value of these types fits the same place.
_OF_ONE_SIZE: Final = _NUMBERS - {str}
_TENSORS: Final = _USUAL | {DTensor}
_LEAF_TYPES: Final = _NUMBERS | _TENSORS | {Encoded}
_KEYS_SHOWN: Final = 5
# A list of numbers has space for the next power of two, or above LIST_STEP the next multiple of it.
LIST_LEAST: Final = 16
LIST_STEP: Final = 2048
# The bytes that one more number in a list may need.
LIST_ENTRY_BYTES: Final = 12
_LIST: Final = "list"
# The same for a text, or all texts of a list together. A zip comment can pad more than one step.
TEXT_LEAST_BYTES: Final = 256
TEXT_STEP_BYTES: Final = 16384
_TEXT: Final = "text"
_ENCODED: Final = "encoded"
_dtype: Final = operator.attrgetter("dtype")
_shape: Final = operator.attrgetter("shape")
_device: Final = operator.attrgetter("device")

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(places: Sequence[int]) -> Picker:
    """Return a function that returns the items at `places` of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple(items[place] for place in places)


class Columns(Mapping[str, Any]):
    """Names and their values as two lists, which nobody changes.

    `names` is the same object as in the last state while the names are the same. So it costs
    nothing to see that thousands of them are.
    """

    __slots__ = ("_by_name", "leaves", "names")

    def __init__(self, names: list[str], leaves: list[Any]) -> None:
        self.names, self.leaves = names, leaves
        self._by_name: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self._mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._mapping()

    def items(self) -> ItemsView[str, Any]:
        return self._mapping().items()

    def values(self) -> ValuesView[Any]:
        return self._mapping().values()

    def _mapping(self) -> dict[str, Any]:
        if self._by_name is None:
            self._by_name = dict(zip(self.names, self.leaves, strict=True))
        return self._by_name


class Flat(Columns):
    """A state flattened as the last one. `facts` is set once they are known."""

    __slots__ = ("facts", "kinds")

    def __init__(self, names: list[str], leaves: list[Any], kinds: list[type]) -> None:
        super().__init__(names, leaves)
        self.kinds = kinds
        self.facts: TensorFacts | None = None


@dataclass(frozen=True)
class _Branch:
    """The names and types of a mapping of only leaves, or of only mappings, in the last state.

    `sequences` are the positions of leaves whose content decides whether they are leaves.
    """

    names: list[str]
    kinds: list[type]
    inner: list[_Branch]
    sequences: list[int]

    @classmethod
    def of(cls, container: Mapping[str, Any]) -> _Branch | None:
        """Return the branch of a mapping whose leaves were checked. None for another structure."""
        values = list(container.values())
        are_inner = [isinstance(value, Mapping) for value in values]
        kinds, sequences, inner = list(map(type, values)), list[int](), list[_Branch]()
        if any(are_inner):
            found = [cls.of(value) for value in values] if all(are_inner) else [None]
            inner = [one for one in found if one is not None]
            if len(inner) < len(found):
                return None
        else:
            sequences = [n for n, kind in enumerate(kinds) if kind not in _LEAF_TYPES]
            if not all(map(is_plain, map(values.__getitem__, sequences))):
                return None
        return cls(_names_of(container), kinds, inner, sequences)

    def add(self, container: Mapping[str, Any], leaves: list[Any], kinds: list[type]) -> bool:
        """Add the leaves and types of a mapping. Return False if its structure is another one."""
        values = _values_of(container)
        names = _names_of(container)
        if (names is not self.names and names != self.names) or self.kinds != list(
            map(type, values)
        ):
            return False
        if self.inner:
            return all(
                branch.add(value, leaves, kinds)
                for branch, value in zip(self.inner, values, strict=True)
            )
        # The options of an optimizer are one object under many keys. It is checked once.
        unusual = {id(values[number]): values[number] for number in self.sequences}
        leaves += values
        kinds += self.kinds
        return all(map(is_plain, unusual.values()))


def _names_of(container: Mapping[str, Any]) -> list[str]:
    return container.names if isinstance(container, Columns) else list(container)


def _values_of(container: Mapping[str, Any]) -> list[Any]:
    return container.leaves if isinstance(container, Columns) else list(container.values())


class Joined:
    """What is kept of the last state that was flattened, for a caller with many similar states."""

    def __init__(self) -> None:
        self._branch: _Branch | None = None
        self._names: list[str] = []
        self._kinds: list[type] = []

    def flatten(self, state: Mapping[str, Any]) -> Flat | None:
        """Return `state` flattened, None if its structure is not that of the last state."""
        leaves, kinds = list[Any](), list[type]()
        if self._branch is None or not self._branch.add(state, leaves, kinds):
            return None
        return Flat(self._names, leaves, self._kinds)

    def keep(self, state: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        """Keep the structure of `state`, which was flattened to `flat`."""
        self._names, self._kinds = list(flat), list(map(type, flat.values()))
        self._branch = _Branch.of(state)


def flatten(state: Mapping[str, Any], joined: Joined | None = None) -> Mapping[str, Any]:
    """Return `state` with nested keys joined by dots, as DCP names them.

    A caller with many similar states keeps `joined`, so that keys are made and checked once. Raises
    `SaveError` with the name of a leaf that is neither a tensor nor a plain value.
    """
    if joined is not None and (again := joined.flatten(state)) is not None:
        return again
    flat: dict[str, Any] = {}
    _flatten_into(flat, "", state)
    if joined is not None:
        joined.keep(state, flat)
    return flat


def _flatten_into(
    flat: dict[str, Any], prefix: str, container: Mapping[str, Any] | list[Any]
) -> None:
    """Add the leaves with their names. As in DCP, a list is a leaf unless it holds tensors."""
    if not isinstance(container, Mapping):
        container = {str(number): value for number, value in enumerate(container)}
    keys, values = [f"{prefix}{name}" for name in container], container.values()
    # The options of an optimizer are one object under many keys. It is checked once.
    unusual = {
        id(value): (key, value)
        for key, value in zip(keys, values, strict=True)
        if type(value) not in _LEAF_TYPES
    }
    if not any(_is_container(value) for _, value in unusual.values()):
        _add_leaves(flat, keys, values, unusual.values())
        return
    for key, value in zip(keys, values, strict=True):
        if _is_container(value):
            _flatten_into(flat, f"{key}.", value)
        else:
            _add_leaves(flat, [key], [value], [(key, value)])


def _add_leaves(
    flat: dict[str, Any],
    keys: Collection[str],
    values: Iterable[Any],
    to_check: Iterable[tuple[str, Any]],
) -> None:
    for key, value in to_check:
        _check_leaf(key, value)
    before = len(flat)
    flat.update(zip(keys, values, strict=True))
    if len(flat) != before + len(keys):
        times = Counter([*islice(flat, before), *keys])
        twice = next(key for key in keys if times[key] > 1)
        raise SaveError(f"two entries have the name {twice} when joined by dots; rename one")


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or (type(value) is list and _is_nested(value))


def _check_leaf(key: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor | Encoded) and not is_plain(value):
        raise SaveError(
            f"{key}: a {type(value).__name__} cannot be saved as checkpoint state. "
            "Expected a tensor, or a bool, int, float, str or None of an optimizer's "
            "parameter group. Make it a tensor, or put it into the train state as JSON"
        )


def _is_nested(entries: Sequence[Any]) -> bool:
    return any(
        isinstance(entry, (torch.Tensor, Mapping)) or (type(entry) is list and _is_nested(entry))
        for entry in entries
    )


def is_plain(value: Any) -> bool:
    """Return True for what a parameter group holds: numbers, texts, and lists of them (betas)."""
    if type(value) in (list, tuple):
        return all(type(entry) in _NUMBERS for entry in value)
    return type(value) in _NUMBERS


class Signature:
    """What a plan depends on, by key: types, shapes and placements, but no values."""

    def __init__(self, flat: Mapping[str, Any]) -> None:
        self._prints = {key: _fingerprint(value) for key, value in flat.items()}
        # The last state that has fitted: nearly all saves have another one like it.
        self._fitted: TensorFacts | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._prints == other._prints

    __hash__ = None  # type: ignore[assignment]

    def fits(self, flat: Mapping[str, Any]) -> bool:
        """Return True if `flat` still fits the plan.

        The facts of one that was flattened as the last one are then known: those of the last, if
        nothing has changed.
        """
        facts, fitted = TensorFacts.of(flat, self._fitted), self._fitted
        is_like = fitted is not None and facts.fit_like(fitted)
        if (
            not is_like
            and {key: _fingerprint(value) for key, value in flat.items()} != self._prints
        ):
            return False
        if fitted is None or not (is_like and facts.are_in_memory_of(fitted)):
            fitted = self._fitted = facts
        if isinstance(flat, Flat) and fitted.memory is not None:
            flat.facts = fitted
        return True

    def find_changes(self, flat: Mapping[str, Any]) -> str | None:
        """Describe what of `flat` no longer fits the plan, with a few keys, or return None."""
        if self.fits(flat):
            return None
        changed = self.differences(flat)
        more = f" and {len(changed) - _KEYS_SHOWN} more" if len(changed) > _KEYS_SHOWN else ""
        return "; ".join(changed[:_KEYS_SHOWN]) + more

    def check(self, flat: Mapping[str, Any]) -> None:
        """Raise `SaveError` with the changes if `flat` no longer fits the plan."""
        changes = self.find_changes(flat)
        if changes is not None:
            raise SaveError(
                f"the state differs from the planned one: {changes}. If you changed it on purpose, "
                "call prepare(state) on all ranks, then save"
            )

    def differences(self, flat: Mapping[str, Any]) -> list[str]:
        now = {key: _fingerprint(value) for key, value in flat.items()}
        return [
            f"{key}: {_describe(now, key, 'missing')}, planned "
            f"{_describe(self._prints, key, 'nothing')}"
            for key in sorted({*now, *self._prints})
            if key not in now or key not in self._prints or now[key] != self._prints[key]
        ]


@dataclass(frozen=True)
class _Places:
    """Where the tensors, and the values that need space, are among the values of a state."""

    tensors: Picker
    sized: Picker

    @classmethod
    def of(cls, kinds: Sequence[type]) -> _Places:
        tensors = [n for n, kind in enumerate(kinds) if kind in _TENSORS]
        sized = [n for n, kind in enumerate(kinds) if kind not in _TENSORS | _OF_ONE_SIZE]
        return cls(picker(tensors), picker(sized))


@dataclass(frozen=True)
class TensorFacts:
    """All that the fingerprints of a state depend on, and how its tensors lie in memory.

    In lists that are compared in C: a loop over the values takes three times as long. `memory` is
    None unless all are plain tensors with a memory. `layouts` is then needed too.
    """

    names: list[str]
    kinds: list[type]
    places: _Places
    form: tuple[list[Any], ...]
    memory: tuple[list[Any], ...] | None
    layouts: list[Any] | None

    @classmethod
    def of(cls, flat: Mapping[str, Any], like: TensorFacts | None = None) -> TensorFacts:
        """Return those of `flat`, which may be like a state whose facts are known."""
        if isinstance(flat, Flat):
            names, values, kinds = flat.names, flat.leaves, flat.kinds
        else:
            names, values = list(flat), list(flat.values())
            kinds = list(map(type, values))
        is_like = like is not None and (kinds is like.kinds or kinds == like.kinds)
        places = like.places if like is not None and is_like else _Places.of(kinds)
        tensors, sized = places.tensors(values), places.sized(values)
        parts = [one._local_tensor if type(one) is DTensor else one for one in tensors]
        types = list(map(type, parts))
        memory = _memory_of(parts) if _USUAL.issuperset(types) else None
        # The options of an optimizer are one object under many keys.
        prints = {key: _fingerprint(one) for key, one in {id(one): one for one in sized}.items()}
        form = (
            types,
            [one._spec for one in tensors if type(one) is DTensor],
            list(map(_dtype, parts)),
            list(map(_shape, parts)),
            list(map(_device, parts)),
            [prints[id(one)] for one in sized],
        )
        # Only a strided tensor has an address.
        layouts = None if memory is not None else [part.layout for part in parts]
        return cls(names, kinds, places, form, memory, layouts)

    def fit_like(self, other: TensorFacts) -> bool:
        """Return True if the state has the fingerprints of the other one."""
        return (
            (self.names is other.names or self.names == other.names)
            and (self.kinds is other.kinds or self.kinds == other.kinds)
            and self.layouts == other.layouts
            and self.form == other.form
        )

    def are_in_memory_of(self, other: TensorFacts) -> bool:
        """Return True if the tensors of states with like fingerprints have the same memory."""
        return self.memory is not None and self.memory == other.memory


def _memory_of(parts: Sequence[torch.Tensor]) -> tuple[list[Any], ...] | None:
    """Return the addresses of tensors, and what else a copy of their bytes depends on."""
    try:
        addresses = list(map(torch.Tensor.data_ptr, parts))
    except RuntimeError:
        # Sparse, or without memory for another reason.
        return None
    return (
        addresses,
        list(map(torch.Tensor.is_contiguous, parts)),
        list(map(torch.Tensor.is_neg, parts)),
        [part.is_conj() for part in parts if part.dtype.is_complex],
    )


def _fingerprint(value: Any) -> tuple[Any, ...] | None:
    """Return the part of one value that a plan depends on, None for any number."""
    if isinstance(value, DTensor):
        local = value._local_tensor
        form = _form_of(local)
        return (value._spec if form is None else (value._spec, form), local.dtype, local.shape)
    if isinstance(value, ShardedTensor):
        return (value.metadata(), None, None)
    if isinstance(value, torch.Tensor):
        return (_form_of(value), value.dtype, value.shape)
    if isinstance(value, Encoded):
        return (_ENCODED, None, _bytes_capacity(len(value.content)))
    if isinstance(value, str):
        room = _text_capacity(value)
        return (_TEXT, None, room) if room > TEXT_LEAST_BYTES else None
    if isinstance(value, list | tuple):
        count, room = capacity_of(value), _text_capacity(*_texts_of(value))
        if room > TEXT_LEAST_BYTES:
            return (_LIST, room, count)
        return (_LIST, None, count) if count > LIST_LEAST else None
    return None


def _form_of(part: torch.Tensor) -> str | None:
    """Return None for a tensor whose bytes are its values, and the form of any other.

    A tensor of another form needs a new plan, which refuses what cannot be saved exactly.
    """
    if type(part) in _USUAL and part.layout is torch.strided and not part.is_meta:
        return None
    return f"a {type(part).__name__} of layout {part.layout} on {part.device.type}"


def capacity_of(numbers: Sequence[Any]) -> int:
    """Return how many numbers the entry of such a list has space for, so that it may grow."""
    return _capacity(len(numbers), LIST_LEAST, LIST_STEP)


def room_of(value: Any) -> int:
    """Return the bytes by which a text or a list may still grow without a new plan."""
    if isinstance(value, Encoded):
        return _bytes_capacity(len(value.content)) - len(value.content)
    if isinstance(value, str):
        return _text_capacity(value) - _text_bytes(value)
    if isinstance(value, list | tuple):
        texts = _texts_of(value)
        more = _text_capacity(*texts) - _text_bytes(*texts)
        return (capacity_of(value) - len(value)) * LIST_ENTRY_BYTES + more
    return 0


def _texts_of(values: Sequence[Any]) -> list[str]:
    return [value for value in values if type(value) is str]


def _text_bytes(*texts: str) -> int:
    return sum(
        len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts
    )


def _text_capacity(*texts: str) -> int:
    return _bytes_capacity(_text_bytes(*texts))


def _bytes_capacity(count: int) -> int:
    return _capacity(count, TEXT_LEAST_BYTES, TEXT_STEP_BYTES)


def _capacity(count: int, least: int, step: int) -> int:
    """Return the next power of two, or above `step` the next multiple of it; at least `least`."""
    if count > step:
        return -(-count // step) * step
    return max(least, 1 << (count - 1).bit_length() if count else 0)


def _describe(prints: Mapping[str, tuple[Any, ...] | None], key: str, absent: str) -> str:
    if key not in prints:
        return absent
    found = prints[key]
    if found is None:
        return "a number or a short text"
    spec, dtype, shape = found
    if spec == _ENCODED:
        return f"an object of up to {shape} bytes"
    if spec == _TEXT:
        return f"a text of up to {shape} bytes"
    if spec == _LIST:
        texts = f", with texts of up to {dtype} bytes" if dtype else ""
        return f"a list of up to {shape} numbers{texts}"
    if dtype is None:
        return f"a sharded tensor of {tuple(spec.size)}"
    form = ""
    if isinstance(spec, tuple):
        spec, form = spec[0], f"{spec[1]} "
    elif isinstance(spec, str):
        spec, form = None, f"{spec} "
    where = "" if spec is None else f"{tuple(spec.shape)} {spec.placements} here "
    return f"{form}{dtype} {where}{tuple(shape)}"
