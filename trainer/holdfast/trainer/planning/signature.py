"""What a plan depends on: the keys, types and shapes of a state, flattened as DCP names them.

Numbers, texts and lists of them have space to grow, so that later values fit the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
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


Joined = dict[str, tuple[list[Any], list[str]]]
"""By the prefix of a mapping: its names, and the keys that they make."""


def flatten(state: Mapping[str, Any], joined: Joined | None = None) -> dict[str, Any]:
    """Return `state` with nested keys joined by dots, as DCP names them.

    A caller with many similar states keeps `joined`, so that keys are made once. Raises `SaveError`
    with the name of a leaf that is neither a tensor nor a plain value.
    """
    flat: dict[str, Any] = {}
    _flatten_into(flat, "", state, {} if joined is None else joined)
    return flat


def _flatten_into(
    flat: dict[str, Any], prefix: str, container: Mapping[str, Any] | list[Any], joined: Joined
) -> None:
    """Add the leaves with their names. As in DCP, a list is a leaf unless it holds tensors."""
    if not isinstance(container, Mapping):
        container = {str(number): value for number, value in enumerate(container)}
    names, values = list(container), container.values()
    kept = joined.get(prefix)
    if kept is None or kept[0] != names:
        kept = joined[prefix] = names, [f"{prefix}{name}" for name in names]
    keys = kept[1]
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
            _flatten_into(flat, f"{key}.", value, joined)
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
        self._fitted: _Columns | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._prints == other._prints

    __hash__ = None  # type: ignore[assignment]

    def fits(self, flat: Mapping[str, Any]) -> bool:
        """Return True if `flat` still fits the plan. Costs a fifth of a microsecond per key."""
        if self._fitted is not None and self._fitted.are_those_of(flat):
            return True
        is_fitting = {key: _fingerprint(value) for key, value in flat.items()} == self._prints
        if is_fitting:
            self._fitted = _Columns.of(flat)
        return is_fitting

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
class _Columns:
    """All that the fingerprints of a state depend on, in lists that are compared in C.

    A loop over the values takes three times as long. `is_tensor` and `has_size` say which values
    are tensors, and which are texts and others that need space.
    """

    keys: list[str]
    kinds: list[type]
    is_tensor: list[bool]
    has_size: list[bool]
    facts: tuple[list[Any], ...]

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> _Columns:
        kinds = list(map(type, flat.values()))
        is_tensor = [kind in _TENSORS for kind in kinds]
        has_size = [kind not in _TENSORS | _OF_ONE_SIZE for kind in kinds]
        facts = _facts_of(flat.values(), is_tensor, has_size)
        return cls(list(flat), kinds, is_tensor, has_size, facts)

    def are_those_of(self, flat: Mapping[str, Any]) -> bool:
        """Return True if `flat` has the same columns, and so the same fingerprints."""
        return (
            list(flat) == self.keys
            and list(map(type, flat.values())) == self.kinds
            and _facts_of(flat.values(), self.is_tensor, self.has_size) == self.facts
        )


def _facts_of(
    values: Collection[Any], is_tensor: list[bool], has_size: list[bool]
) -> tuple[list[Any], ...]:
    tensors = list(compress(values, is_tensor))
    parts = [one._local_tensor if type(one) is DTensor else one for one in tensors]
    # The options of an optimizer are one object under many keys.
    sized = list(compress(values, has_size))
    prints = {key: _fingerprint(one) for key, one in {id(one): one for one in sized}.items()}
    return (
        [one._spec if type(one) is DTensor else None for one in tensors],
        list(map(type, parts)),
        [part.dtype for part in parts],
        [part.shape for part in parts],
        [part.layout for part in parts],
        [part.device for part in parts],
        [prints[id(one)] for one in sized],
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
