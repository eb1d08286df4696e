"""Modules that load their own state: which names they judge, and what torch lets them load.

A module with `set_extra_state`, or with a custom `_load_from_state_dict` or load hook, may
accept a tensor whose shape differs from the one that it has now: bytes of an extra state, or the
ranges of a quantization observer. Holdfast gives such a module what was saved, as `torch.load` and
`load_state_dict` do.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state.forms import Forms, assemble, spread
from holdfast.trainer.state.names import as_buffer, hidden_child, is_known, loads_itself

MODEL: Final = "model"
# FSDP1's name for the module that it wraps.
_OF_FSDP1: Final = "_fsdp_wrapped_module"


@dataclass(frozen=True)
class OwnLoading:
    """The names in a model's state that modules judge themselves.

    `modules` has the module of each prefix whose own tensors it judges. `extra` has the names of
    extra states. The name of a part of an extra state begins with it and a dot.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    extra: frozenset[str] = frozenset()

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> OwnLoading:
        """Find them. Raises `CheckpointError` for an extra state that no load can set."""
        modules: dict[str, nn.Module] = {}
        extra: set[str] = set()
        for model in models:
            for prefix, module in _walk(model, ""):
                kind = type(module)
                if kind.get_extra_state is not nn.Module.get_extra_state:
                    # Refused when the Session is made, and not at the first relaunch, see
                    # decision 87.
                    if kind.set_extra_state is nn.Module.set_extra_state:
                        raise CheckpointError(
                            f"model.{prefix}{_EXTRA_STATE_KEY_SUFFIX}: {kind.__name__} has "
                            "get_extra_state without set_extra_state, so no load could restore "
                            "it; define both, or neither"
                        )
                    extra.add(f"{prefix}{_EXTRA_STATE_KEY_SUFFIX}")
                hooks = module._load_state_dict_pre_hooks.values()
                if loads_itself(kind) or not all(map(is_known, hooks)):
                    modules[prefix] = module
        return cls(modules, frozenset(extra))

    def __bool__(self) -> bool:
        return bool(self.modules or self.extra)

    def extra_state_of(self, name: str) -> str | None:
        """Return the name of the extra state that `name` is, or is a part of."""
        parts = name.split(".")
        for number, part in enumerate(parts, 1):
            if (
                part == _EXTRA_STATE_KEY_SUFFIX
                and (whole := ".".join(parts[:number])) in self.extra
            ):
                return whole
        return None

    def judges(self, name: str) -> bool:
        """Return True if a module decides itself whether it loads the tensor `name`."""
        if not self:
            return False
        head, dot, _ = name.rpartition(".")
        return head + dot in self.modules or self.extra_state_of(name) is not None


def gathered(
    found: Mapping[str, Any], own: OwnLoading, forms: Forms | None = None
) -> dict[str, Any]:
    """Return a model's state with extra states as tensors and plain values by name.

    Their forms are added to `forms`, under names that begin with `model.`.
    """
    made: dict[str, Any] = {}
    for name, value in found.items():
        if own.extra_state_of(name) != name:
            made[name] = value
        elif type(value) is torch.Tensor:
            made[name] = as_buffer(value)
        else:
            noted: Forms = {}
            spread(value, name, made, noted)
            if forms is not None:
                forms.update({f"{MODEL}.{path}": form for path, form in noted.items()})
    return made


def want(
    target: dict[str, Any],
    own: OwnLoading,
    saved: Mapping[str, STORAGE_TYPES],
    forms: Forms,
    *,
    takes: Callable[[str], bool],
    strict: bool,
) -> None:
    """Change `target` to what the modules that judge themselves load of `saved`, by name.

    `saved` has what the checkpoint has of the model and the load takes. `target` gets a new tensor
    for each of these modules' names, so that a module never loads from its own memory.
    """
    judged = {name: entry for name, entry in saved.items() if own.judges(name)}
    for name in [name for name in target if own.judges(name) and takes(name)]:
        whole = own.extra_state_of(name)
        is_saved = name in judged if whole is None else _has_extra_state(whole, judged, forms)
        # Without `strict`, a module keeps what the checkpoint does not have.
        if name not in judged and (strict if whole is None else is_saved):
            # The module must see that the name is missing, so that it can raise its own error.
            del target[name]
    for name, entry in judged.items():
        live = target.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            target[name] = None
        elif isinstance(live, DTensor):
            # Only the module knows how it would shard another shape.
            target[name] = torch.empty_like(live)
        else:
            device = live.device if isinstance(live, torch.Tensor) else "cpu"
            target[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def assembled(
    loaded: Mapping[str, Any], live: Mapping[str, Any], own: OwnLoading, forms: Forms
) -> dict[str, Any]:
    """Return what a model's `load_state_dict` gets: `loaded`, with whole extra states.

    `live` is the model's own state. It has the values of what was left out.
    """
    state = {name: loaded.get(name, value) for name, value in live.items() if not own.judges(name)}
    for name in loaded:
        if own.extra_state_of(name) is None and own.judges(name):
            state[name] = loaded[name]
    for whole in own.extra:
        parts = {
            f"v{name[len(whole) :]}": value
            for name, value in loaded.items()
            if own.extra_state_of(name) == whole
        }
        begin = len(f"{MODEL}.{whole}")
        its = {f"v{path[begin:]}": forms[path] for path in _below(f"{MODEL}.{whole}", forms)}
        made = assemble(parts, its)
        state[whole] = made.get("v", live.get(whole))
    return state


def _has_extra_state(whole: str, saved: Mapping[str, Any], forms: Forms) -> bool:
    is_there = any(name == whole or name.startswith(f"{whole}.") for name in saved)
    return is_there or bool(_below(f"{MODEL}.{whole}", forms))


def _below(name: str, forms: Forms) -> list[str]:
    return [path for path in forms if path == name or path.startswith(f"{name}.")]


def versions_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what `state_dict` records of each module, so that none takes its state for old."""
    return {name: {"version": module._version} for name, module in model.named_modules()}


def with_versions(state: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Any]:
    """Return `state` as `model.state_dict()` would have returned it."""
    made = OrderedDict(state)
    made._metadata = versions_of(model)  # type: ignore[attr-defined]
    return made


def find_refused(
    module: nn.Module,
    prefix: str,
    fresh: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
) -> list[str]:
    """Return why `module`, with tensors like `fresh`, would refuse to load `saved`.

    Names are those below `prefix`. This loads into a copy whose tensors have no memory. A module
    that cannot be copied, or whose loading needs values, is not asked: it judges at the load.
    """
    # Children stay shared: only this module's own tensors are judged, and copies cost memory.
    memo: dict[int, Any] = {id(child): child for child in module.children()}
    for own in (*module._parameters.values(), *module._buffers.values()):
        if own is not None:
            memo[id(own)] = torch.empty_like(own, device="meta")
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    try:
        trial = copy.deepcopy(module, memo)
        for own_names in (trial._parameters, trial._buffers):
            for name in own_names:
                own_names[name] = _like(
                    fresh.get(name), is_parameter=own_names is trial._parameters
                )
        state = {f"{prefix}{name}": torch.empty_like(t, device="meta") for name, t in saved.items()}
        with torch.no_grad():
            # Strict, and without memory: this asks only whether the shapes would be taken.
            trial._load_from_state_dict(
                state, prefix, {"version": module._version}, True, missing, unexpected, errors
            )
    except Exception:
        # The module's own code may do anything with tensors that have no values.
        return []
    return [
        *errors,
        *(f"missing {name}" for name in missing),
        *(f"unexpected {n}" for n in unexpected),
    ]


def _like(tensor: torch.Tensor | None, *, is_parameter: bool) -> Any:
    if tensor is None:
        return None
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with the prefix of its canonical names."""
    yield prefix, module
    hidden = hidden_child(type(module))
    if isinstance(module, FullyShardedDataParallel):
        hidden = _OF_FSDP1
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name == hidden else f"{prefix}{name}.")
