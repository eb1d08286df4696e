"""Optimizer state by parameter name, flattened as in stock DCP, gathered and put back.

State is found and never created. The program's own first step creates it, so that training under a
session equals training without one. State that only a checkpoint has is rebuilt from the
checkpoint: from its keys, their sizes and types, and its forms. So a checkpoint may be older than
the state of a parameter, and a program may unfreeze a parameter later.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, cycle
from typing import Any, Final

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.planning.compare_keys import shorten
from holdfast.trainer.planning.signature import Columns
from holdfast.trainer.planning.signature import is_plain as is_plain_value
from holdfast.trainer.process import devices
from holdfast.trainer.state import plain
from holdfast.trainer.state.forms import (
    ADDED,
    DOTTED,
    GROUPS,
    OTHER,
    SIMPLE,
    STATE,
    Forms,
    SavedOptimizer,
    SavedPart,
    assemble,
    blank,
    form_of,
    raise_twice,
    spread,
    view_of,
)
from holdfast.trainer.state.names import copy_unless_same

# The state keys that torch's own optimizers have for a stepped parameter, by their options.
#
# This table creates nothing. It detects a checkpoint of the same optimizer with other options,
# such as `amsgrad`, whose state has too few keys for the program's optimizer, or too many.

# Options of torch's own classes. Other options were added by a scheduler or by the program.
OPTIONS_OF_TORCH: Final = frozenset(
    option
    for kind in vars(optim).values()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)
    for option in inspect.signature(kind).parameters
)
_ADAM: Final = ("step", "exp_avg", "exp_avg_sq")
_KEYS: Final[Mapping[type, tuple[str, ...]]] = {
    optim.ASGD: ("step", "eta", "mu", "ax"),
    optim.Adadelta: ("step", "square_avg", "acc_delta"),
    optim.Adagrad: ("step", "sum"),
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.Adamax: ("step", "exp_avg", "exp_inf"),
    optim.Muon: ("momentum_buffer",),
    optim.NAdam: (*_ADAM, "mu_product"),
    optim.RAdam: _ADAM,
    optim.RMSprop: ("step", "square_avg"),
    optim.Rprop: ("step", "prev", "step_size"),
    optim.SGD: (),
    optim.SparseAdam: _ADAM,
}


def known_keys(
    optimizer: optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any]
) -> frozenset[str] | None:
    """Return the state keys of a stepped `parameter`, or None if they are not known."""
    kind = type(optimizer)
    if kind is optim.Adafactor:
        sizes = ("row_var", "col_var") if parameter.dim() > 1 else ("variance",)
        return frozenset(("step", *sizes))
    if kind not in _KEYS:
        return None
    more = []
    if kind in (optim.Adam, optim.AdamW) and group["amsgrad"]:
        more.append("max_exp_avg_sq")
    if kind is optim.SGD and group["momentum"] != 0:
        more.append("momentum_buffer")
    if kind is optim.RMSprop:
        more += ["momentum_buffer"] * (group["momentum"] > 0) + ["grad_avg"] * group["centered"]
    return frozenset((*_KEYS[kind], *more))


# Not options of a parameter: the list itself, and the program's names, which contain wrappers.
_NOT_OPTIONS: Final = frozenset({"params", "param_names"})
NAMES_SHOWN: Final = 5
_NOTHING: Final[dict[Any, Any]] = {}
_OF_TORCH: Final = "torch.optim."
_UNSHARDED: Final = frozenset({torch.Tensor, torch.nn.Parameter})

Names = Mapping[int, str]
"""Canonical names by the ids of parameters."""


def unwrap(optimizer: Any) -> Any:
    """Return the innermost optimizer of a pure wrapper such as Accelerate's, else `optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    # Only a pure wrapper, which shares groups and state. Another one may have more state.
    while (
        isinstance(inner, Optimizer)
        and getattr(optimizer, "param_groups", None) is inner.param_groups
        and getattr(optimizer, "state", None) is inner.state
    ):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def is_plain(optimizer: Optimizer) -> bool:
    """Return True if neither own methods nor hooks change what is saved or loaded."""
    kind, own = type(optimizer), optimizer.__dict__
    hooks = (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    return not any(hooks) and all(
        getattr(kind, name) is getattr(Optimizer, name) and name not in own
        for name in ("state_dict", "load_state_dict")
    )


def awaits_state(optimizer: Optimizer) -> bool:
    """Return True if a trained parameter has no state yet and may still get some."""
    return any(
        p.requires_grad
        # A parameter of plain SGD never gets any state, so it awaits none.
        and not optimizer.state.get(p)
        and known_keys(optimizer, p, group) != frozenset()
        for group in optimizer.param_groups
        for p in group["params"]
    )


def check_names(optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raise `CheckpointError` unless each parameter is in the model and in only one optimizer."""
    seen: set[int] = set()
    for optimizer in optimizers:
        every = _parameters(optimizer)
        unknown = [p for p in every if id(p) not in names]
        if unknown:
            shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:NAMES_SHOWN])
            raise CheckpointError(
                f"{type(optimizer).__name__} has {len(unknown)} parameters that are not in the "
                f"model (shapes {shapes}); expected the model's own. Create the optimizer after "
                "the model is sharded, and give Session every module that it trains: "
                "model=[model, head]"
            )
        twice = sorted(names[id(p)] for p in every if id(p) in seen)
        if twice:
            raise CheckpointError(
                f"two optimizers have the parameters {', '.join(twice[:NAMES_SHOWN])}; expected "
                "each parameter in only one optimizer"
            )
        seen.update(id(p) for p in every)


class OptimizerState:
    """The flattened state of one optimizer: `state.<name>.…`, `param_groups.<name>.…`.

    `number` is its index among the program's optimizers. An optimizer that defines its own state
    is read and written through its own `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: Optimizer, number: int = 0) -> None:
        self._optimizer, self._number = optimizer, number
        # The keys of each group's options, and the owners and options they were made from.
        self._keys: dict[int, tuple[list[str], list[str], list[str]]] = {}
        # The names of the last state, if it was as usual, and what they depend on.
        self._usual: tuple[list[Any], list[str]] | None = None
        # The groups when the Session was made, with tensors without memory as parameters.
        self._fresh: list[dict[str, Any]] = []
        self._fresh_names: dict[int, str] = {}
        self._fresh_of: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}

    def remember(self, names: Names) -> None:
        """Record the groups as a new launch of the program has them before it loads."""
        _, groups = self._now()
        for group in groups:
            kept = _options(group) | {"params": []}
            for parameter in group["params"]:
                # On `meta`, so the record of the groups costs no memory.
                bare = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                kept["params"].append(bare)
                self._fresh_names[id(bare)] = names[id(parameter)]
                self._fresh_of[names[id(parameter)]] = bare, kept
            self._fresh.append(kept)

    def wanted_afresh(self, found: dict[str, Any], saved: SavedOptimizer) -> None:
        """Add what `wanted` would in a new launch, with tensors without memory."""
        self.wanted(found, saved, self._fresh_names, self._fresh)

    @property
    def fresh_names(self) -> Collection[str]:
        """The names of the parameters at `remember`."""
        return self._fresh_of.keys()

    def find_regrouped(self) -> str:
        """Return what has changed in the groups since `remember`, "" if nothing has."""
        now = [set(owners) for owners, _, _ in self._keys.values()]
        then = [{self._fresh_names[id(p)] for p in group["params"]} for group in self._fresh]
        if now == then:
            return ""
        ours, theirs = set().union(*now), set().union(*then)
        parts = [
            f"{text} {shorten(sorted(names))}"
            for text, names in (("with", ours - theirs), ("without", theirs - ours))
            if names
        ]
        parts = parts or [
            f"{len(now)} instead of {len(then)}" if len(now) != len(then) else "others"
        ]
        return f"the groups of optimizer {self._number} have changed: {'; '.join(parts)}"

    def gather(self, names: Names, forms: Forms | None = None) -> Mapping[str, Any]:
        """Return live tensors and numbers by key. Add their forms to `forms`."""
        usual = self._read_usual(names) if forms is None else None
        if usual is not None and self._usual is not None and usual[0] == self._usual[0]:
            return Columns(self._usual[1], usual[1])
        found: dict[str, Any] = {}
        state, groups = self._now()
        if len(self._keys) > len(groups):
            self._keys.clear()
        for number, group in enumerate(groups):
            owners = [names[id(p)] for p in group["params"]]
            for parameter, name in zip(group["params"], owners, strict=True):
                # Missing state is never created, not even by a step with a gradient of zero, see
                # decision 21.
                values = state.get(parameter)
                if values is not None:
                    self._require_mapping(name, values)
                if values:
                    _gather_one(found, parameter, group, f"{STATE}.{name}", values, forms)
                    self._mark_added(values, parameter, group, name, forms)
            flat: dict[str, Any] = {}
            noted: Forms = {}
            for option, value in _options(group).items():
                spread(value, option, flat, noted)
            keys = self._option_keys(number, owners, list(flat))
            found.update(zip(keys, cycle(flat.values())))
            if forms is not None:
                self._note_options(owners, flat, noted, forms)
        self._gather_others(found, state, forms)
        self._usual = None
        if (
            usual is not None
            and len(found) == len(usual[1])
            and all(map(operator.is_, found.values(), usual[1]))
        ):
            self._usual = usual[0], list(found)
        return found

    def _require_mapping(self, owner: str, values: Any) -> None:
        """Raise `CheckpointError` if the state of a parameter is not a mapping."""
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"optimizer.{STATE}.{owner}: the state that {type(self._optimizer).__name__} "
                f"has of this parameter is a {type(values).__name__}; expected a dict, as "
                'self.state[p] = {"momentum": …}'
            )

    def _read_usual(self, names: Names) -> tuple[list[Any], list[Any]] | None:
        """Return the values in the order of `gather`, and before them all that their names need.

        None unless each value is saved as it is, and belongs to a parameter.
        """
        if not is_plain(self._optimizer):
            return None
        state = self._optimizer.state
        outline, leaves, with_state = list[Any](), list[Any](), 0
        for group in self._optimizer.param_groups:
            parameters, options = group["params"], _options(group)
            found = list(map(state.get, parameters))
            with_state += len(found) - found.count(None)
            states = [_NOTHING if its is None else its for its in found]
            if set(map(type, states)) != {dict}:
                return None
            values = list(chain.from_iterable(map(dict.values, states)))
            kinds = list(map(type, values))
            if not SIMPLE.issuperset(kinds) or not all(map(_is_one_value, options.values())):
                return None
            # A tensor beside a sharded parameter may be a part of its own, unless it is a scalar.
            if any(issubclass(kind, DTensor) for kind in set(map(type, parameters))) and any(
                value.dim() for value in values if type(value) in _UNSHARDED
            ):
                return None
            owners = list(map(names.get, map(id, parameters)))
            keys = list(chain.from_iterable(states))
            outline += owners, list(map(len, states)), keys, list(options)
            leaves += values
            leaves += list(options.values()) * len(owners)
        return (outline, leaves) if with_state == len(state) else None

    def wanted(
        self,
        found: dict[str, Any],
        saved: SavedOptimizer,
        names: Names,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Add state that only `saved` has to `found`: blank tensors, and None for numbers.

        `groups` are the optimizer's own, or those of `remember`. The optimizer itself does not
        change until `put_back`.
        """
        if groups is None:
            _, groups = self._now()
        for group in groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                part = saved.state.get(name)
                if part is not None and part.entries:
                    self._want_one(found, f"{STATE}.{name}", part, parameter, group)
                options = saved.options.get(name)
                if options is not None:
                    self._want_one(found, f"{GROUPS}.{name}", options, parameter, group)
        for other, number in saved.others.items():
            if number == self._number and other in saved.state:
                beside = torch.empty(0, device=devices.CPU)
                self._want_one(found, f"{STATE}.{other}", saved.state[other], beside, {})

    def put_back(self, loaded: Mapping[str, Any], saved: SavedOptimizer, names: Names) -> None:
        """Put the loaded values that `wanted` named into the optimizer."""
        state, groups = self._now()
        for number, group in enumerate(groups):
            options = _options(group)
            # No key belongs to a group without parameters, so its options are in the document.
            if not group["params"]:
                its = saved.empty_groups.get(f"{self._number}.{number}", {})
                made = plain.decode(its, {})
                options |= plain.from_bytes(made) if isinstance(made, bytes) else made
            for parameter in group["params"]:
                name = names[id(parameter)]
                now = state.get(parameter) or {}
                if _put(now, _made(loaded, f"{STATE}.{name}", now, saved, saved.state.get(name))):
                    state[parameter] = now
                part = saved.options.get(name)
                _put(options, _made(loaded, f"{GROUPS}.{name}", options, saved, part))
            group.update(options)
        for other, number in saved.others.items():
            if number == self._number and other in saved.state:
                part = saved.state[other]
                paths = {path: f"{other}.{path}" if path else other for path in part.entries}
                forms = {f"{other}.{path}" if path else other: f for path, f in part.forms.items()}
                leaves = {
                    path: loaded[f"{STATE}.{path}"]
                    for path in paths.values()
                    if f"{STATE}.{path}" in loaded
                }
                _put(state, assemble(leaves, forms))
        self._commit(state, groups)

    @property
    def _is_of_torch(self) -> bool:
        return type(self._optimizer).__module__.startswith(_OF_TORCH)

    def empty_groups(self) -> dict[str, Any]:
        """Return the options of groups without parameters, which no key contains, as plain data.

        Options that contain tensors are bytes.
        """
        found = {}
        for number, group in enumerate(self._optimizer.param_groups):
            if not group["params"]:
                name = f"optimizer.param_groups of the empty group {number}"
                made, tensors = plain.encode(_options(group), name)
                if tensors:
                    made, _ = plain.encode(plain.to_bytes(_options(group), name), name)
                found[f"{self._number}.{number}"] = made
        return found

    def _now(self) -> tuple[Any, list[dict[str, Any]]]:
        """Return state by parameter, and groups, from the optimizer or from its `state_dict`."""
        optimizer = self._optimizer
        if is_plain(optimizer):
            return optimizer.state, optimizer.param_groups
        document = optimizer.state_dict()
        more = sorted(document.keys() - {STATE, GROUPS})
        if more:
            raise CheckpointError(
                f"{type(optimizer).__name__}.state_dict has {', '.join(map(repr, more))} besides "
                f"{STATE!r} and {GROUPS!r}, which a checkpoint by parameters cannot contain; save "
                'it whole: Session(model, extra={"optimizer": optimizer})'
            )
        every = _parameters(optimizer)
        state = {
            every[key] if isinstance(key, int) and key < len(every) else key: value
            for key, value in document[STATE].items()
        }
        groups = [
            {**its, "params": live["params"]}
            for its, live in zip(document[GROUPS], optimizer.param_groups, strict=True)
        ]
        return state, groups

    def _commit(self, state: Any, groups: list[dict[str, Any]]) -> None:
        """Load the state and groups into an optimizer that defines its own state."""
        if is_plain(self._optimizer):
            return
        numbers = {id(p): n for n, p in enumerate(_parameters(self._optimizer))}
        self._optimizer.load_state_dict(
            {
                STATE: {numbers.get(id(key), key): value for key, value in state.items()},
                GROUPS: [
                    {**group, "params": [numbers[id(p)] for p in group["params"]]}
                    for group in groups
                ],
            }
        )

    def _gather_others(self, found: dict[str, Any], state: Any, forms: Forms | None) -> None:
        """Add state that an optimizer keeps under a name instead of a parameter."""
        for name, value in state.items():
            if isinstance(name, torch.Tensor):
                continue
            key = f"{STATE}.{name}"
            if not isinstance(name, str) or any(k.startswith(f"{key}.") for k in found):
                raise CheckpointError(
                    f"{type(self._optimizer).__name__}.state has an entry under {name!r}; expected "
                    "parameters, or text that is not a parameter's name"
                )
            if forms is not None:
                forms[key] = {OTHER: self._number} | ({DOTTED: True} if "." in name else {})
            spread(value, key, found, forms)

    def _want_one(
        self,
        found: dict[str, Any],
        prefix: str,
        part: SavedPart,
        parameter: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        entries = part.entries
        known, is_state = None, prefix.startswith(f"{STATE}.")
        if is_state and group:
            known = known_keys(self._optimizer, parameter, group)
        # A parameter that was never stepped may have values of the program only.
        for path in known or () if known and not known.isdisjoint(entries) else ():
            # The comparison of keys refuses a key that the checkpoint lacks, by its name.
            if path not in entries:
                found.setdefault(f"{prefix}.{path}", None)
        for path, entry in entries.items():
            key = f"{prefix}.{path}" if path else prefix
            form = part.forms.get(path, {})
            if key in found:
                continue
            # Marked when it was saved, so it is accepted as plain torch would accept it, see
            # decision 87.
            if not form.get(ADDED):
                if known is not None and path not in known:
                    continue
                # A class has all its options. One that is missing now was not an option of this
                # program.
                if not is_state and self._is_of_torch and path in OPTIONS_OF_TORCH:
                    continue
            found[key] = blank(entry, parameter, group, form, part.was)

    def _mark_added(
        self,
        values: Mapping[Any, Any],
        parameter: torch.Tensor,
        group: Mapping[str, Any],
        name: str,
        forms: Forms | None,
    ) -> None:
        """Mark state that the program added to a parameter's, so that a load accepts it."""
        if forms is None:
            return
        known = known_keys(self._optimizer, *self._fresh_of.get(name, (parameter, group)))
        if known is None:
            return
        for key, value in values.items():
            if key not in known:
                flat: dict[str, Any] = {}
                spread(value, f"{STATE}.{name}.{key}", flat)
                for path in flat:
                    forms.setdefault(path, {})[ADDED] = True

    def _note_options(
        self, owners: Sequence[str], flat: Mapping[str, Any], noted: Forms, forms: Forms
    ) -> None:
        """Add the forms of a group's options. Mark those that its class would not have."""
        for name in owners:
            its = {option: dict(form) for option, form in noted.items()}
            if self._is_of_torch and name in self._fresh_of:
                for option in flat.keys() & OPTIONS_OF_TORCH - self._fresh_of[name][1].keys():
                    its.setdefault(option, {})[ADDED] = True
            forms.update({f"{GROUPS}.{name}.{option}": form for option, form in its.items()})

    def _option_keys(self, number: int, owners: list[str], options: list[str]) -> list[str]:
        """Return a key for each parameter and option of a group, cached until these change."""
        kept = self._keys.get(number)
        if kept is None or kept[0] != owners or kept[1] != options:
            keys = [f"{GROUPS}.{name}.{option}" for name in owners for option in options]
            kept = self._keys[number] = owners, options, keys
        return kept[2]


def _is_one_value(option: Any) -> bool:
    """Return True for an option that is saved as it is under one name."""
    kind = type(option)
    return kind in SIMPLE or (kind in (list, tuple) and is_plain_value(option))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gather_one(
    found: dict[str, Any],
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    prefix: str,
    values: Mapping[Any, Any],
    forms: Forms | None,
) -> None:
    """Add the state of one parameter to `found`, and its forms to `forms`."""
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if key in found:
            raise_twice(key)
        if type(name) is not str:
            raise CheckpointError(
                f"{prefix}: the optimizer has a state value under {name!r}; expected text"
            )
        flat: dict[str, Any] = {}
        if forms is not None and "." in name:
            forms[key] = {DOTTED: True}
        spread(value, key, flat, forms)
        for path, one in flat.items():
            if path in found:
                raise_twice(path)
            is_tensor = isinstance(one, torch.Tensor)
            found[path] = view_of(one, parameter) if is_tensor else one
            form = form_of(one, parameter, group) if is_tensor and forms is not None else None
            if forms is not None and form:
                forms.setdefault(path, {}).update(form)


def _put(live: dict[Any, Any], made: Mapping[Any, Any]) -> bool:
    """Put `made` into `live`, tensors in place. Return True if `made` is not empty."""
    for key, value in made.items():
        old = live.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            copy_unless_same(old, value)
        elif isinstance(old, dict) and isinstance(value, dict):
            _put(old, value)
        else:
            live[key] = value
    return bool(made)


def _made(
    loaded: Mapping[str, Any],
    prefix: str,
    now: Mapping[Any, Any],
    saved: SavedOptimizer,
    part: SavedPart | None,
) -> dict[str, Any]:
    """Return the loaded values under `prefix`, and those of `now`, rebuilt with their forms."""
    noted: Forms = {}
    flat: dict[str, Any] = {}
    for key, value in now.items():
        spread(value, str(key), flat, noted)
    part = part or SavedPart()
    flat |= dict.fromkeys(part.entries)
    leaves = {path: loaded[f"{prefix}.{path}"] for path in flat if f"{prefix}.{path}" in loaded}
    return assemble(leaves, part.forms if saved.knows_forms else noted)
