"""The canonical names of a model's tensors, independent of wrappers.

The prefixes `module.` of DDP, `_orig_mod.` of a compiled model and `_checkpoint_wrapped_module.`
of an activation-checkpointed one are not part of a name, so a checkpoint loads into each of these
forms. The names are those of stock DCP's `get_model_state_dict`. Each call walks over the modules
again, or compares all that the last walk has found, so it sees replaced parameters and new
submodules.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.planning.rank_rows import refuse_marked_shard
from holdfast.trainer.planning.signature import Picker, picker

# Wrapper → the child whose name is not part of a canonical name.
WRAPPERS: Final[Mapping[type[nn.Module], str]] = {
    DistributedDataParallel: "module",
    DataParallel: "module",
    OptimizedModule: "_orig_mod",
    ActivationWrapper: "_checkpoint_wrapped_module",
}
# Hooks of these modules change neither names nor values that the walk finds. Those of torchtitan
# split a fused parameter for other programs; the parameter itself is saved and loaded.
_KNOWN_HOOKS: Final = (
    "torch.distributed.fsdp.",
    "torch.distributed.algorithms._checkpoint.",
    "torchtitan.",
)
_SAVING: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
_LOADING: Final = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
# `_NormBase` reads old versions of its own state and is otherwise standard.
_STANDARD: Final = (nn.Module, nn.modules.batchnorm._NormBase)


# What a walk reads of each module.
_PARTS: Final = operator.itemgetter(
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_not_persistent: Final = operator.itemgetter("_non_persistent_buffers_set")
_shape: Final = operator.attrgetter("shape")


@dataclass
class Named:
    """The live tensors of a model by canonical name, not copies.

    `parameters` maps a parameter's id to its first name. `buffers` is the set of buffer names. The
    names describe the model's state only if `is_plain`. Otherwise a module defines its own state
    and its `state_dict` must be called.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)
    is_plain: bool = True


def find_all(models: Sequence[nn.Module]) -> Named:
    """Find the names of all models. Raises `CheckpointError` if two models share a name."""
    parts = [find_named(model) for model in models]
    if len(parts) == 1:
        return parts[0]
    return Named(
        merge_disjoint([part.tensors for part in parts]),
        {name for part in parts for name in part.buffers},
        {key: name for part in parts for key, name in part.parameters.items()},
        all(part.is_plain for part in parts),
    )


class Walk:
    """Finds the names of models again and again, see `find_all`.

    A full walk calls Python for each module. The next ones only compare what it has read, object by
    object, and repeat it if anything is another object.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._seen: _Seen | None = None

    def find(self) -> Named:
        """Return the names as they are now. Raises like `find_all`."""
        named = None if self._seen is None else self._seen.named_again()
        if named is None:
            named = find_all(self._models)
            self._seen = _Seen.of(self._models, named)
        return named


@dataclass(frozen=True)
class _Seen:
    """What a walk has read, with weak references: an exchanged module or tensor is freed."""

    modules: list[Callable[[], Any]]
    kinds: list[type]
    sizes: list[int]
    keys: list[Any]
    values: list[Callable[[], Any]]
    absent: int
    not_persistent: list[set[str]]
    named: Named
    names: list[str]
    places: Picker

    @classmethod
    def of(cls, models: Sequence[nn.Module], named: Named) -> _Seen | None:
        """Return what a walk has just read to find `named`, None if each walk must be a full one.

        It must be if a module defines its own state, or has a hook that the walk has to call.
        """
        modules = [module for model in models for module in model.modules()]
        hooks = [hook for module in modules for hook in module._state_dict_pre_hooks.values()]
        if not named.is_plain or not all(map(_is_of_fsdp, hooks)):
            return None
        own = list(map(vars, modules))
        try:
            parts = list(chain.from_iterable(map(_PARTS, own)))
            values = list(chain.from_iterable(map(dict.values, parts)))
            held = [_held_weakly(value) for value in values]
        except (KeyError, TypeError):
            # A scripted module has its parts elsewhere.
            return None
        at = {id(value): number for number, value in enumerate(values)}
        return cls(
            [weakref.ref(module) for module in modules],
            list(map(type, modules)),
            list(map(len, parts)),
            list(chain.from_iterable(parts)),
            held,
            sum(value is None for value in values),
            [set(names) for names in map(_not_persistent, own)],
            Named({}, named.buffers, named.parameters),
            list(named.tensors),
            picker([at[id(tensor)] for tensor in named.tensors.values()]),
        )

    def named_again(self) -> Named | None:
        """Return the names, None if anything that a walk reads is another object.

        The hooks of FSDP2 put its sharded parameters back. They are not called here, because the
        sharded parameters are there if all tensors are those that were there after such a call.
        """
        modules = [reference() for reference in self.modules]
        if list(map(type, modules)) != self.kinds:
            return None
        own = list(map(vars, modules))
        if any("state_dict" in one or "load_state_dict" in one for one in own):
            return None
        try:
            parts = list(chain.from_iterable(map(_PARTS, own)))
            not_persistent = list(map(_not_persistent, own))
        except (KeyError, TypeError):
            return None
        if list(map(len, parts)) != self.sizes or not_persistent != self.not_persistent:
            return None
        # Most parts are empty, and each costs a call.
        filled = list(filter(None, parts))
        values = list(chain.from_iterable(map(dict.values, filled)))
        then = [reference() for reference in self.values]
        # One that was freed is None too, and so may be what has replaced it.
        if sum(map(operator.is_, then, repeat(None))) != self.absent:
            return None
        if list(chain.from_iterable(filled)) != self.keys:
            return None
        if not all(map(operator.is_, values, then)):
            return None
        tensors = dict(zip(self.names, self.places(values), strict=True))
        return Named(tensors, self.named.buffers, self.named.parameters)


def _held_weakly(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` while it lives."""
    return _none if value is None else weakref.ref(value)


def _none() -> None:
    return None


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(_KNOWN_HOOKS[0])


def find_named(model: nn.Module) -> Named:
    """Walk `model` and its submodules. A tied parameter has all its names in `tensors`."""
    found = Named()
    _walk(model, "", found)
    return found


def is_fsdp1(model: nn.Module) -> bool:
    """Return True if `FullyShardedDataParallel` manages flat parameters in the model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def merge_disjoint(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all parts into one mapping. Raises `CheckpointError` if two parts share a name."""
    merged: dict[str, Any] = {}
    for part in parts:
        if not merged.keys().isdisjoint(part):
            twice = sorted(merged.keys() & part.keys())
            raise CheckpointError(
                f"two of the models have tensors with the same name: {', '.join(twice[:5])}; "
                "expected the parts of one model under their names in the whole model, for example "
                "stages made by deleting layers from it, or one nn.ModuleDict over them"
            )
        merged.update(part)
    return merged


def copy_unless_same(live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy `loaded` into `live`, unless both share their memory and type."""
    now, then = (t._local_tensor if isinstance(t, DTensor) else t for t in (live, loaded))
    # A load reads into live tensors where it can, so most of them need no copy.
    if now.data_ptr() != then.data_ptr() or now.dtype != then.dtype:
        with torch.no_grad():
            live.copy_(loaded)


def as_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view that planning treats as a buffer, whose copies may differ by rank."""
    return torch.nn.Buffer(tensor.detach())


class Views:
    """Detached views of tensors, by name. Views of a DTensor are cached while they are valid."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[DTensor, DTensor]] = {}
        self._last: _LastViews | None = None

    def of(
        self, tensors: Mapping[str, torch.Tensor], buffers: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return a detached view of each tensor, which shares the tensor's current memory.

        Views of `buffers` are marked: the ranks' copies may differ, and one rank's copy is saved.
        """
        last, self._last = self._last, None
        if last is not None and last.are_of(tensors, buffers):
            self._last = last
            return dict(last.views)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                found[name] = self._sharded(name, tensor, is_buffer=name in buffers)
                continue
            # A view lacks these attributes, so the plan would not see them.
            refuse_marked_shard(name, tensor)
            found[name] = as_buffer(tensor) if name in buffers else tensor.detach()
        if all(type(tensor) is DTensor for tensor in tensors.values()):
            self._last = _LastViews.of(tensors, buffers, found)
        return found

    def _sharded(self, name: str, tensor: DTensor, *, is_buffer: bool) -> DTensor:
        kept = self._kept.get(name)
        if kept is not None and kept[0] is tensor:
            # A resize or `.data =` gives a parameter new memory under the same object.
            now, then = tensor._local_tensor, kept[1]._local_tensor
            if now.data_ptr() == then.data_ptr() and now.shape == then.shape:
                return kept[1]
        # A detach of a DTensor runs its dispatcher, which costs more than all other work here.
        view = as_buffer(tensor) if is_buffer else tensor.detach()
        assert isinstance(view, DTensor)
        self._kept[name] = tensor, view
        return view


@dataclass(frozen=True)
class _LastViews:
    """Views of tensors that are all DTensors, and what they depend on."""

    names: list[str]
    tensors: list[DTensor]
    buffers: Collection[str]
    views: dict[str, torch.Tensor]
    addresses: list[int]
    shapes: list[torch.Size]

    @classmethod
    def of(
        cls, tensors: Mapping[str, Any], buffers: Collection[str], views: Mapping[str, Any]
    ) -> _LastViews:
        parts = [view._local_tensor for view in views.values()]
        return cls(
            list(tensors),
            list(tensors.values()),
            buffers,
            dict(views),
            list(map(torch.Tensor.data_ptr, parts)),
            list(map(_shape, parts)),
        )

    def are_of(self, tensors: Mapping[str, Any], buffers: Collection[str]) -> bool:
        """Return True if the views are those of `tensors`, and share their memory."""
        if list(tensors) != self.names or buffers != self.buffers:
            return False
        if not all(map(operator.is_, tensors.values(), self.tensors)):
            return False
        # A resize or `.data =` gives a parameter new memory under the same object.
        parts = [tensor._local_tensor for tensor in tensors.values()]
        return self.addresses == list(map(torch.Tensor.data_ptr, parts)) and (
            self.shapes == list(map(_shape, parts))
        )


def _walk(module: nn.Module, prefix: str, found: Named) -> None:
    """Add the tensors of `module` and its submodules, named as by `state_dict`."""
    if isinstance(module, FullyShardedDataParallel):
        # Its tensors are flat, and its hooks would gather them from all ranks.
        found.is_plain = False
        return
    # FSDP2 swaps its sharded parameters back in with such a hook.
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, False)
    found.is_plain = found.is_plain and _is_plain(module)
    tensors, parameters = found.tensors, found.parameters
    # Every save walks again, because a missed replacement would save old weights without an error,
    # see decision 11.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tensors[prefix + name] = parameter
            parameters.setdefault(id(parameter), prefix + name)
    # Non-persistent buffers are not in `state_dict` either.
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            tensors[prefix + name] = buffer
            found.buffers.add(prefix + name)
    hidden = hidden_child(type(module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, prefix if name == hidden else f"{prefix}{name}.", found)


def _is_plain(module: nn.Module) -> bool:
    """Return False if the module or a hook changes what is saved or loaded."""
    for hooks in (
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        for hook in hooks.values():
            if not is_known(hook):
                return False
    own = module.__dict__
    # A method that was set on the instance hides that of the class.
    return _is_standard(type(module)) and "state_dict" not in own and "load_state_dict" not in own


def is_known(hook: Any) -> bool:
    """Return True for a hook that changes neither names nor values that the walk finds."""
    # torch wraps a load hook in an object that holds the function as `hook`.
    function = getattr(hook, "hook", hook)
    origin = str(getattr(function, "__module__", ""))
    known = _known.get(origin)
    if known is None:
        known = _known[origin] = origin.startswith(_KNOWN_HOOKS)
    return known


_known: dict[str, bool] = {}
_standard: dict[type, bool] = {}
_hidden: dict[type, str | None] = {}


def _is_standard(kind: type[nn.Module]) -> bool:
    """Return True if the class leaves saving and loading to `nn.Module`. Cached by class."""
    known = _standard.get(kind)
    if known is None:
        known = _standard[kind] = (
            not hasattr(kind, "_fqn_modifiers")
            and all(getattr(kind, name) is getattr(nn.Module, name) for name in _SAVING)
            and all(
                any(getattr(kind, name) is getattr(standard, name) for standard in _STANDARD)
                for name in _LOADING
            )
        )
    return known


def loads_itself(kind: type[nn.Module]) -> bool:
    return kind not in _STANDARD and not any(
        kind._load_from_state_dict is one._load_from_state_dict for one in _STANDARD
    )


def hidden_child(kind: type[nn.Module]) -> str | None:
    """Return the name of the child that a wrapper wraps, or None."""
    if kind not in _hidden:
        names = [name for wrapper, name in WRAPPERS.items() if issubclass(kind, wrapper)]
        _hidden[kind] = names[0] if names else None
    return _hidden[kind]
