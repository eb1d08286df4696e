"""Lightning: a callback for `Trainer`, and a session for a loop of your own with `Fabric`.

    trainer = L.Trainer(**torchrun_size(), callbacks=[Holdfast()])
    trainer.fit(model)

| module | purpose |
|---|---|
| `callback.py` | what users add to their program; it refuses settings that cannot work |
| `fit.py` | one `fit` under a session: where it opens, ends its steps, stops and closes |
| `loops.py` | Lightning's loops and checkpoint connector, with the places that a resume needs |
| `state.py` | what Lightning knows beside weights, optimizers and schedulers |
| `data.py` | the position in the training data |
| `metrics.py` | values that Lightning accumulates over an epoch |
| `files.py` | the files of `ModelCheckpoint` |
| `fabric.py` | `Fabric` |
"""

from holdfast.trainer.frameworks.versions import require

# Before the imports below, so that a missing or unsupported version is an error with advice.
require("lightning")

from holdfast.trainer.frameworks.lightning.callback import Holdfast, torchrun_size  # noqa: E402
from holdfast.trainer.frameworks.lightning.fabric import fabric_session  # noqa: E402

__all__ = ["Holdfast", "fabric_session", "torchrun_size"]
