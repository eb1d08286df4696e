"""Which saved key goes to which wanted key, and what is left over: decided before a byte is read.

Keys are flattened, `model.…`, `optimizer.state.…` and so on. What is said of a parameter holds
for its optimizer state as well: a rename or an exclusion of `model.head` is also one of the
moments and group settings of `head`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from holdfast.contracts.errors import KeyMismatchError

KEYS_SHOWN: Final = 8
_MODEL: Final = "model."
_OF_A_PARAMETER: Final = ("optimizer.state.", "optimizer.param_groups.")
_ALL: Final = ".*"
# A module may be called so too: below `model` and `optimizer`, and deep in an extra, it is one.
_OF_ONE_RANK: Final = re.compile(r"rng\.rank\d{5,}(?:\..*)?|extra\.[^.]+\.rank\d{5,}")


@dataclass(frozen=True)
class Selection:
    """What of a checkpoint is taken, and under which names.

    `include` and `exclude` are wanted keys or the beginnings of such up to a dot; an empty
    `include` means all. `rename` maps saved names to wanted ones, exactly or, with `old.*` to
    `new.*`, all that begin so. `strict` refuses keys that only one side has.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True

    def takes(self, key: str) -> bool:
        """True when the wanted `key` is to be loaded."""
        if any(_lies_under(key, prefix) for prefix in self.exclude):
            return False
        return not self.include or any(_lies_under(key, prefix) for prefix in self.include)

    def renamed(self, key: str) -> str:
        """The wanted name of the saved `key`."""
        return _apply(self.rename, key)

    def rename_all(self, saved: Collection[str]) -> dict[str, str]:
        """Saved key → wanted key, for all of `saved`, most of them unchanged.

        Raises `KeyMismatchError` for a rule that fits no key, and for two keys that would
        become one.
        """
        names = {key: _apply(self.rename, key) for key in saved}
        unused = [old for old in self.rename if not any(_fits(old, key) for key in saved)]
        uneven = [pair for pair in self.rename.items() if len({_is_prefix(n) for n in pair}) > 1]
        owners: dict[str, str] = {}
        twice = [
            f"{owners[new]} and {old} would both be {new}"
            for old, new in sorted(names.items())
            if owners.setdefault(new, old) != old
        ]
        reasons = [f"{old}: no saved key is called that" for old in unused] + twice
        reasons += [f"{old} to {new}: only one of them is a beginning" for old, new in uneven]
        if reasons:
            raise KeyMismatchError(
                f"the rename cannot be done: {shorten(reasons)}; expected saved names, whole or "
                "as `old.*`, to names of this program's state"
            )
        return names


@dataclass(frozen=True)
class KeyComparison:
    """How the keys wanted differ from the keys saved; lines of `reshaped` say both shapes.

    `converted` are those whose type differs, which are loaded and said.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


def compare(
    wanted: Mapping[str, Any], saved: Mapping[str, STORAGE_TYPES], pick: Selection
) -> KeyComparison:
    """Compare one rank's flattened state with the saved entries, already renamed."""
    reshaped, converted = [], []
    for key, value in wanted.items():
        entry = saved.get(key)
        if entry is None or not pick.takes(key):
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != isinstance(entry, TensorStorageMetadata):
            kinds = ("a tensor", "a number") if is_tensor else ("a number", "a tensor")
            reshaped.append(f"{key}: wanted {kinds[0]}, saved {kinds[1]}")
        elif not isinstance(entry, TensorStorageMetadata):
            continue
        elif entry.size != value.size():
            reshaped.append(f"{key}: wanted {tuple(value.size())}, saved {tuple(entry.size)}")
        elif entry.properties.dtype != value.dtype:
            converted.append(f"{key}: {_name(entry.properties.dtype)} to {_name(value.dtype)}")
    return KeyComparison(
        missing=tuple(sorted(key for key in wanted if key not in saved and pick.takes(key))),
        extra=tuple(sorted(key for key in saved if key not in wanted and pick.takes(key))),
        reshaped=tuple(sorted(reshaped)),
        converted=tuple(sorted(converted)),
        excluded=tuple(sorted(key for key in {*wanted, *saved} if not pick.takes(key))),
    )


def join(comparisons: Iterable[KeyComparison]) -> KeyComparison:
    """One verdict of all ranks': extra is what none of them wants, the rest what any one says."""
    found = list(comparisons)
    extra = set(found[0].extra).intersection(*(each.extra for each in found))
    return KeyComparison(
        missing=_united(each.missing for each in found),
        extra=tuple(sorted(extra)),
        reshaped=_united(each.reshaped for each in found),
        converted=_united(each.converted for each in found),
        excluded=_united(each.excluded for each in found),
    )


def combine(one: KeyComparison, other: KeyComparison) -> KeyComparison:
    """What both say, of different keys."""
    lines = {
        each.name: tuple(sorted({*getattr(one, each.name), *getattr(other, each.name)}))
        for each in fields(KeyComparison)
    }
    return KeyComparison(**lines)


def raise_mismatch(where: str, found: KeyComparison, *, strict: bool) -> None:
    """Raise `KeyMismatchError` where shapes differ or, with `strict`, keys do.

    Keys of one rank alone come and go with the world size and are never an error.
    """
    missing = [key for key in found.missing if not is_of_one_rank(key)]
    extra = [key for key in found.extra if not is_of_one_rank(key)]
    if not found.reshaped and not (strict and (missing or extra)):
        return
    parts = [
        f"{title}: {shorten(keys)}"
        for title, keys in (
            ("wanted but not saved", missing),
            ("saved but not wanted", extra),
            ("of another shape", found.reshaped),
        )
        if keys
    ]
    raise KeyMismatchError(
        f"{where} does not fit this program's state. {'. '.join(parts)}. Load it into the model "
        "and optimizer that saved it, name what was renamed with rename, leave parts out with "
        "exclude, or pass strict=False to take only what is in both",
        missing=missing,
        extra=extra,
        reshaped=found.reshaped,
    )


def is_of_one_rank(key: str) -> bool:
    """True for keys such as `rng.rank00003.cpu`, which one rank alone saves and wants.

    At another world size such keys come and go, so they are reported and never an error.
    """
    return _OF_ONE_RANK.fullmatch(key) is not None


def shorten(keys: Collection[str]) -> str:
    """The first `KEYS_SHOWN` of `keys`, and how many more there are."""
    shown = ", ".join(list(keys)[:KEYS_SHOWN])
    return shown + (f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else "")


def _lies_under(key: str, prefix: str) -> bool:
    """True for the key itself, for what follows it after a dot, and for its optimizer state."""
    return any(key == name or key.startswith(f"{name}.") for name in (prefix, *_beside(prefix)))


def _beside(name: str) -> tuple[str, ...]:
    """Where the optimizer's state lies of what `name` says of the model; empty for other names."""
    if not name.startswith(_MODEL):
        return ()
    return tuple(part + name.removeprefix(_MODEL) for part in _OF_A_PARAMETER)


def _apply(rules: Mapping[str, str], key: str) -> str:
    """`key` by the first rule that fits it, or as it is."""
    for old, new in rules.items():
        if key == old:
            return new
        pairs = [(old, new)] if _is_prefix(old) else []
        pairs += zip(_beside(old), _beside(new), strict=False)
        for before, after in pairs:
            before, after = before.removesuffix(_ALL), after.removesuffix(_ALL)
            if key.startswith(f"{before}."):
                return after + key.removeprefix(before)
    return key


def _fits(old: str, key: str) -> bool:
    return key == old or (_is_prefix(old) and key.startswith(old.removesuffix("*")))


def _is_prefix(name: str) -> bool:
    return name.endswith(_ALL)


def _united(lines: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({line for some in lines for line in some}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
