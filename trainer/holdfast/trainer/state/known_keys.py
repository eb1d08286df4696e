"""The state keys that torch's own optimizers have for a stepped parameter, by their options.

This table creates nothing. It detects a checkpoint of the same optimizer with other options, such
as `amsgrad`, whose state has too few keys for the program's optimizer, or too many.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import optim

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
