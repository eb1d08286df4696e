"""Lightning: a callback for `Trainer`, and a `Fabric` for loops of your own.

    trainer = L.Trainer(**torchrun_size(), callbacks=[Holdfast()])
    trainer.fit(model)

    fabric = Fabric()
    for epoch in fabric.epochs(10): ...

| module | purpose |
|---|---|
| `callback.py` | what users add to their program; it refuses settings that cannot work |
| `fit.py` | one `fit` under a session, from its start to its end, and Lightning's loops and state |
| `data.py` | the position in the training data, which may be a stream |
| `read_again.py` | streams without shards, whose batches a resume reads again |
| `metrics.py` | values that Lightning accumulates over an epoch |
| `files.py` | the files of `ModelCheckpoint` |
| `fabric_drop_in.py` | `Fabric` for a loop of your own, and a session for your own sampler |
| `global_batch.py` | the same samples in each step at another number of ranks |

All other names are those of `lightning` and `lightning.fabric`, so a program may import the module
in place of one of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from holdfast.trainer.versions import require

# Before the imports below, so that a missing or unsupported version is an error with advice.
require("lightning")

from holdfast.trainer.frameworks.lightning.callback import Holdfast, torchrun_size  # noqa: E402
from holdfast.trainer.frameworks.lightning.fabric_drop_in import (  # noqa: E402
    Fabric,
    fabric_session,
)

__all__ = ["Fabric", "Holdfast", "fabric_session", "torchrun_size"]


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        for module in ("lightning", "lightning.fabric"):
            found = import_module(module)
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
