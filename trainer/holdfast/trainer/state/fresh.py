"""What a new launch of the program has before it loads, and what it could not load.

A checkpoint is loaded by the same command. The state that a program has when it makes its Session
is therefore the state that a resume loads into. Before the first save, and whenever the layout of
the state has changed, `Fresh.find_problems` compares the two as a load would.

A checkpoint need not quite fit (`ResumeFit`). A run has one command for all its launches, so a
rename or an exclusion has the same meaning in each of them. It applies to every checkpoint that was
saved without it. Each checkpoint records those with which it was saved. From such a checkpoint an
excluded part is restored if it fits, because otherwise each preemption would lose it again. If it
does not fit, it is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import SpecError
from holdfast.trainer.planning.compare_keys import Selection, compare, shorten
from holdfast.trainer.state.forms import ADDED, DOTTED, GROUPS, OTHER, Forms, SavedOptimizer
from holdfast.trainer.state.optimizers import OptimizerState
from holdfast.trainer.state.own_loading import MODEL, OwnLoading, find_refused

OPTIMIZER: Final = "optimizer"
FIT: Final = "fit"
PARTS: Final = ("model", "optimizer", "scheduler", "rng", "extra")


@dataclass(frozen=True, kw_only=True)
class ResumeFit:
    """The arguments of `Selection` for a whole resume: renamed names and excluded parts.

    Parts are `model`, `optimizer`, `scheduler`, `rng`, `extra.<name>`, or deeper ones such as
    `model.head`. Parts in `if_needed` are left out only if they do not fit.
    """

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    if_needed: Sequence[str] = ()

    @classmethod
    def of(
        cls, *, strict: bool, rename: Mapping[str, str] | None, exclude: str | Collection[str]
    ) -> ResumeFit:
        """Return the fit for a user's arguments. `exclude` may be a single name.

        Raises `TypeError`, and `SpecError` for an excluded name that begins like no part.
        """
        pick = Selection.of(exclude=exclude, rename=rename, strict=strict)
        for name in pick.exclude:
            if name.partition(".")[0] not in PARTS:
                near = difflib.get_close_matches(name.partition(".")[0], PARTS, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise SpecError(
                    f"exclude={exclude!r}: no part of the state is called {name!r}{hint} Expected "
                    f"one of {', '.join(PARTS)}, or a name that begins with one of them and a dot"
                )
        return cls(strict=pick.strict, rename=pick.rename, exclude=pick.exclude)

    def describe(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps of this fit."""
        return {"rename": dict(self.rename), "exclude": list(self.exclude)}

    def still_to_do(self, document: Mapping[str, Any]) -> ResumeFit:
        """Return what of this fit the checkpoint of `document` was not yet saved with."""
        recorded = document.get(FIT) or {}
        renamed, excluded = recorded.get("rename", {}), recorded.get("exclude", ())
        return replace(
            self,
            # A rename that the checkpoint was saved with is already in its names.
            rename={old: new for old, new in self.rename.items() if renamed.get(old) != new},
            exclude=tuple(name for name in self.exclude if name not in excluded),
            # Left out only if they do not fit. Otherwise each preemption would drop the part again,
            # see decision 87.
            if_needed=tuple(name for name in self.exclude if name in excluded),
        )

    def without(self, more: Collection[str]) -> ResumeFit:
        if not more:
            return self
        left = tuple(name for name in self.if_needed if name not in more)
        return replace(self, exclude=(*self.exclude, *more), if_needed=left)

    def parts_over(self, keys: Collection[str]) -> list[str]:
        """Return the `if_needed` parts that contain all of `keys`, or none if they do not.

        `keys` are those for which a checkpoint does not fit.
        """
        if not keys or any(map(Selection(exclude=tuple(self.if_needed)).takes, keys)):
            return []
        return [
            name for name in self.if_needed if not all(map(Selection(exclude=(name,)).takes, keys))
        ]


@dataclass(frozen=True)
class Fresh:
    """The state of the program when its Session was made, as tensors without memory.

    `values` has it by key, None for a number. `shared` are keys whose elements share memory, as
    those of an expanded tensor. `aliases` are groups of keys that share memory with each other.
    """

    values: Mapping[str, torch.Tensor | None]
    shared: frozenset[str] = frozenset()
    aliases: tuple[frozenset[str], ...] = ()
    optimizers: Sequence[OptimizerState] = field(default_factory=list)

    @classmethod
    def of(cls, flat: Mapping[str, Any], optimizers: Sequence[OptimizerState]) -> Fresh:
        """Record `flat`, the keys that are loaded into what the program has."""
        return cls(
            values={key: _without_memory(value) for key, value in flat.items()},
            shared=frozenset(key for key, value in flat.items() if has_shared_elements(value)),
            aliases=tuple(find_aliases(flat)),
            optimizers=optimizers,
        )

    def find_problems(
        self, flat: Mapping[str, Any], fit: ResumeFit, own: OwnLoading, forms: Forms
    ) -> list[str]:
        """Return why a new launch could not load a checkpoint of `flat`, by keys."""
        # As a load would see them: the same comparison decides what is refused here and there, see
        # decision 87.
        entries = {key: _entry_of(value) for key, value in flat.items()}
        wanted = self._wanted(entries, forms)
        pick = Selection(exclude=tuple(fit.exclude), strict=fit.strict)
        found = compare(wanted, entries, pick)
        problems = []
        if pick.takes(f"{OPTIMIZER}.{GROUPS}"):
            problems = list(filter(None, (each.find_regrouped() for each in self.optimizers)))
        # The changed groups explain all differences of the optimizers' keys.
        explained = f"{OPTIMIZER}." if problems else None
        for title, lines in (
            ("the program did not have then", found.extra if fit.strict else ()),
            ("the program had then and has no longer", found.missing if fit.strict else ()),
            ("of another shape then", _then_and_now(found.reshaped)),
        ):
            left = [
                line
                for line in lines
                if not _is_judged(line, own) and not (explained and line.startswith(explained))
            ]
            if left:
                problems.append(f"{title}: {shorten(left)}")
        problems += self._find_refused(flat, own, pick)
        return problems + self._find_shared(flat, own, pick)

    def _wanted(self, entries: Mapping[str, dcp.STORAGE_TYPES], forms: Forms) -> dict[str, Any]:
        """Return what a new launch would load `entries` into."""
        wanted = dict(self.values)
        prefix = f"{OPTIMIZER}."
        ours = {k.removeprefix(prefix): e for k, e in entries.items() if k.startswith(prefix)}
        # Devices and shardings make no difference here.
        plain: Forms = {
            # Only these three change which keys a load wants.
            key: {kind: form[kind] for kind in (ADDED, DOTTED, OTHER) if kind in form}
            for key, form in forms.items()
        }
        found = {k.removeprefix(prefix): v for k, v in wanted.items() if k.startswith(prefix)}
        names = {name for each in self.optimizers for name in each.fresh_names}
        saved = SavedOptimizer.of(ours, plain, names)
        for each in self.optimizers:
            each.wanted_afresh(found, saved)
        return wanted | {f"{prefix}{key}": value for key, value in found.items()}

    def _find_refused(self, flat: Mapping[str, Any], own: OwnLoading, pick: Selection) -> list[str]:
        """Return what modules that judge their tensors themselves would refuse."""
        refused = []
        for prefix, module in own.modules.items():
            now = _directly_below(f"{MODEL}.{prefix}", flat)
            then = _directly_below(f"{MODEL}.{prefix}", self.values)
            is_same = now.keys() == then.keys() and all(
                value.shape == then[name].shape for name, value in now.items()
            )
            is_taken = all(pick.takes(f"{MODEL}.{prefix}{name}") for name in {*now, *then})
            if not is_same and is_taken:
                refused += find_refused(module, prefix, then, now)
        return refused

    def _find_shared(self, flat: Mapping[str, Any], own: OwnLoading, pick: Selection) -> list[str]:
        """Return lines about tensors that no load can fill with what `flat` has."""
        problems = []
        shared = sorted(
            key
            for key in self.shared
            if pick.takes(key) and key in flat and not _is_judged(key, own)
        )
        if shared:
            problems.append(
                f"elements that share memory, as in an expanded tensor, which no load can fill: "
                f"{shorten(shared)}; make it a tensor of its own with .clone()"
            )
        return problems

    def find_parted(self, state: Mapping[str, Mapping[str, Any]], fit: ResumeFit) -> list[str]:
        """Return lines about tensors of `state` that no longer share memory with each other.

        A load would put two values into one place. No key, shape or type changes with that, so
        every save asks. Few programs have such tensors.
        """
        problems = []
        for group in self.aliases:
            pick = Selection(exclude=tuple(fit.exclude))
            found = {}
            for key in group:
                part, _, rest = key.partition(".")
                if rest in state.get(part, {}) and pick.takes(key):
                    found[key] = state[part][rest]
            if len(found) > 1 and frozenset(found) not in find_aliases(found):
                problems.append(
                    f"tensors that shared memory then and no longer do: {shorten(sorted(found))}"
                )
        return problems


def has_shared_elements(value: Any) -> bool:
    """Return True for a tensor in which several elements have one place in memory."""
    part = _strided_part(value)
    # An expanded tensor has a stride of 0. Loading into it would write several values to one place.
    if part is None:
        return False
    sizes = zip(part.shape, part.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def find_aliases(flat: Mapping[str, Any]) -> list[frozenset[str]]:
    spans = sorted(span for key, value in flat.items() if (span := _span(key, value)) is not None)
    groups: list[frozenset[str]] = []
    keys: set[str] = set()
    # Sorted by address, so overlapping tensors are neighbours.
    end = 0
    for start, stop, key in spans:
        if start >= end:
            if len(keys) > 1:
                groups.append(frozenset(keys))
            keys = set()
        keys.add(key)
        end = max(end, stop)
    return [*groups, frozenset(keys)] if len(keys) > 1 else groups


def _span(key: str, value: Any) -> tuple[int, int, str] | None:
    """Return the addresses of the first element and after the last, or None without memory."""
    part = _strided_part(value)
    if part is None:
        return None
    try:
        start = part.data_ptr()
    except RuntimeError:
        # A tensor without memory, which planning refuses by its key.
        return None
    if not start:
        return None
    extents = zip(part.shape, part.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in extents)
    return start, start + (last + 1) * part.itemsize, key


def _strided_part(value: Any) -> torch.Tensor | None:
    """Return this rank's part of a tensor, None if it is empty or has no strides."""
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return None
    part = value._local_tensor if isinstance(value, DTensor) else value
    return part if part.layout is torch.strided and part.numel() else None


def _without_memory(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    # On `meta`, so that the record of a model costs no memory.
    return torch.empty(value.size(), dtype=value.dtype, device="meta")


def _entry_of(value: Any) -> dcp.STORAGE_TYPES:
    if not isinstance(value, torch.Tensor):
        return dcp.BytesStorageMetadata()
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=value.dtype), value.size(), [])


def _then_and_now(lines: Iterable[str]) -> list[str]:
    return [line.replace("wanted ", "then ").replace("saved ", "now ") for line in lines]


def _is_judged(line: str, own: OwnLoading) -> bool:
    """Return True if a module judges the key with which `line` begins."""
    key, _, _ = line.partition(": ")
    return key.startswith(f"{MODEL}.") and own.judges(key.removeprefix(f"{MODEL}."))


def _directly_below(prefix: str, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of one module, without those of its children, by their own names."""
    return {
        key.removeprefix(prefix): value
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
        and key.startswith(prefix)
        and "." not in key.removeprefix(prefix)
    }


def describe(problems: Iterable[str]) -> str:
    return (
        "the same command could not load a checkpoint of this state, because a resume loads into "
        f"the state that the program has when it makes its Session: {'; '.join(problems)}. Give "
        "the model its tensors, and the optimizer all its groups, before the Session is made. An "
        "optimizer leaves parameters without a gradient alone. Or name the parts that a resume may "
        "begin afresh: exclude=[…]"
    )
