"""Matches saved keys with wanted keys, and lists the rest, before any byte is read.

Keys are flattened: `model.…`, `optimizer.state.…` and so on. A rule for a parameter also applies to
its optimizer state: a rename or an exclusion of `model.head` includes the moments and group
settings of `head`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from holdfast.contracts.errors import KeyMismatchError

KEYS_SHOWN: Final = 8
NEAREST_SHOWN: Final = 3
_MODEL: Final = "model."
_OF_A_PARAMETER: Final = ("optimizer.state.", "optimizer.param_groups.")
_ALL: Final = ".*"
# Names that a program may give for any checkpoint, whether it has such a part or not.
_PARTS: Final = frozenset({"model", "optimizer"})
# A module may have such a name too: below `model` and `optimizer`, and deeper in an extra.
_OF_ONE_RANK: Final = re.compile(r"rng\.rank\d{5,}(?:\..*)?|extra\.[^.]+\.rank\d{5,}")


@dataclass(frozen=True)
class Selection:
    """Which keys of a checkpoint are loaded, and under which names.

    `include` and `exclude` are wanted keys or prefixes that end before a dot. An empty `include`
    means all. `rename` maps saved names to wanted ones, exactly or by prefix with `old.*` to
    `new.*`. `strict` refuses keys that only one side has.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True

    @classmethod
    def of(
        cls,
        *,
        include: str | Collection[str] = (),
        exclude: str | Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> Selection:
        """Return the selection of a caller's arguments. Raises `TypeError`, which names one."""
        if not isinstance(strict, bool):
            raise TypeError(f"strict={strict!r}: expected True or False")
        return cls(
            names_of(include, "include"), names_of(exclude, "exclude"), rules_of(rename), strict
        )

    def check_names(self, known: Set[str]) -> None:
        """Raise `KeyMismatchError` for a name to include or exclude that fits no `known` key.

        It is raised too if `exclude` leaves nothing to load.
        """
        unmet = [
            # A name here needs no `.*`, so the nearest ones are shown without it.
            f"{title} {name!r}: no key has this name{_nearest(name.removesuffix(_ALL), known)}"
            for title, names in (("include", self.include), ("exclude", self.exclude))
            for name in names
            if not (name in _PARTS or name in known or any(_lies_under(key, name) for key in known))
        ]
        if unmet:
            raise KeyMismatchError(
                f"the selection is not possible: {shorten(unmet)}; expected complete keys, or "
                "beginnings of keys that end before a dot"
            )
        if self.exclude and known and not any(map(self.takes, known)):
            raise KeyMismatchError(
                f"exclude {', '.join(self.exclude)} leaves no key of include "
                f"{', '.join(self.include) or '(all)'}, so nothing would be loaded; expected fewer "
                "names to exclude"
            )

    def takes(self, key: str) -> bool:
        if any(_lies_under(key, prefix) for prefix in self.exclude):
            return False
        return not self.include or any(_lies_under(key, prefix) for prefix in self.include)

    def renamed(self, key: str) -> str:
        return _apply(self.rename, key)

    def rename_all(self, saved: Collection[str]) -> dict[str, str]:
        """Map each saved key in `saved` to its wanted key. Most keys stay unchanged.

        Raises `KeyMismatchError` for a rule that fits no key, and for two keys that would get
        the same name.
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
        reasons = [f"{old}: no saved key has this name{_nearest(old, saved)}" for old in unused]
        reasons += twice
        reasons += [f"{old} to {new}: only one of them ends with .*" for old, new in uneven]
        if reasons:
            raise KeyMismatchError(
                f"the rename is not possible: {shorten(reasons)}; expected saved names, complete "
                "or as `old.*`, mapped to names of this program's state"
            )
        return names


@dataclass(frozen=True)
class KeyComparison:
    """The differences between wanted and saved keys. Lines of `reshaped` contain both shapes.

    `converted` lists the keys whose type differs. They are loaded and reported.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


def compare(
    wanted: Mapping[str, Any], saved: Mapping[str, STORAGE_TYPES], pick: Selection
) -> KeyComparison:
    """Compare one rank's flattened state with the saved entries, which are already renamed."""
    reshaped, converted = [], []
    for key, value in wanted.items():
        entry = saved.get(key)
        if entry is None or not pick.takes(key):
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != isinstance(entry, TensorStorageMetadata):
            kinds = ("a tensor", "a number") if is_tensor else ("a number", "a tensor")
            reshaped.append(f"{key}: wanted {kinds[0]}, saved {kinds[1]}")
        # A number has no shape or type that could differ.
        elif not isinstance(entry, TensorStorageMetadata):
            continue
        elif entry.size != value.size():
            reshaped.append(f"{key}: wanted {tuple(value.size())}, saved {tuple(entry.size)}")
        # Loaded and converted. Another precision on purpose is common, so it is reported and no
        # error.
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
    """Join all ranks' comparisons. `extra` is what no rank wants; the rest is the union."""
    found = list(comparisons)
    # With a pipeline or per-rank keys, each rank wants other keys. A key that one of them wants is
    # not left over.
    extra = set(found[0].extra).intersection(*(each.extra for each in found))
    return replace(unite(found), extra=tuple(sorted(extra)))


def raise_mismatch(where: str, found: KeyComparison, *, strict: bool) -> None:
    """Raise `KeyMismatchError` if shapes differ or, with `strict`, if keys differ.

    Per-rank keys depend on the world size and are never an error.
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
        "and optimizer that saved it, map renamed keys with rename, leave parts out with "
        "exclude, or pass strict=False to load only the keys that both have",
        missing=missing,
        extra=extra,
        reshaped=found.reshaped,
    )


def names_of(given: object, parameter: str) -> tuple[str, ...]:
    """Return one name, or several, as a tuple. Raises `TypeError`, which names `parameter`."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Collection) or isinstance(names, bytes | Mapping):
        raise TypeError(f"{parameter}={given!r}: expected a name, or a list of names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{parameter}={given!r}: {name!r} is not a name; expected text")
    return tuple(names)


def rules_of(given: object) -> dict[str, str]:
    """Return the rules of a rename, which may be None. Raises `TypeError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"rename={given!r}: expected a mapping of saved names to new names")
    for pair in given.items():
        if not all(isinstance(name, str) and name for name in pair):
            raise TypeError(f"rename={given!r}: {pair[0]!r} to {pair[1]!r}; expected two names")
    return dict(given)


def is_of_one_rank(key: str) -> bool:
    """Return True for keys such as `rng.rank00003.cpu`, which only one rank saves and wants.

    Such keys depend on the world size, so they are reported and never an error.
    """
    return _OF_ONE_RANK.fullmatch(key) is not None


def shorten(keys: Collection[str]) -> str:
    """Return the first `KEYS_SHOWN` of `keys`, and the number of further keys."""
    shown = ", ".join(list(keys)[:KEYS_SHOWN])
    return shown + (f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else "")


def _nearest(name: str, keys: Collection[str]) -> str:
    """Return "; did you mean …?" with the keys or beginnings of keys most like `name`, or ""."""
    known = dict.fromkeys(begin for key in keys for begin in _beginnings(key))
    wanted, end = name.removesuffix(_ALL), _ALL if _is_prefix(name) else ""
    near = difflib.get_close_matches(wanted, known, n=NEAREST_SHOWN)
    return f"; did you mean {' or '.join(one + end for one in near)}?" if near else ""


def _beginnings(key: str) -> Iterator[str]:
    """Yield each beginning of `key` that ends before a dot, and the key."""
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _lies_under(key: str, prefix: str) -> bool:
    """Return True for the key itself, for keys below it, and for its optimizer state."""
    return any(key == name or key.startswith(f"{name}.") for name in (prefix, *_beside(prefix)))


def _beside(name: str) -> tuple[str, ...]:
    """Return the optimizer keys for a model key `name`, or () for other names."""
    if not name.startswith(_MODEL):
        return ()
    return tuple(part + name.removeprefix(_MODEL) for part in _OF_A_PARAMETER)


def _apply(rules: Mapping[str, str], key: str) -> str:
    """Return `key` renamed by the first rule that fits, or unchanged."""
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


def unite(found: Collection[KeyComparison]) -> KeyComparison:
    """Return a comparison with all keys of some."""
    return KeyComparison(
        **{
            each.name: tuple(sorted({key for one in found for key in getattr(one, each.name)}))
            for each in fields(KeyComparison)
        }
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
