"""The adapter for the Hugging Face `Trainer`.

    from holdfast.trainer.frameworks.transformers import Trainer  # instead of transformers

`Trainer` is a `transformers.Trainer` whose training state is saved and resumed by a `Session`.
Public names are imported on first use, after a check of the installed versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.trainer.versions import require

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.transformers.trainer import (
        HoldfastCallback as HoldfastCallback,
    )
    from holdfast.trainer.frameworks.transformers.trainer import (
        Seq2SeqTrainer as Seq2SeqTrainer,
    )
    from holdfast.trainer.frameworks.transformers.trainer import Trainer as Trainer
    from holdfast.trainer.frameworks.transformers.trainer import attach as attach

__all__ = ["HoldfastCallback", "Seq2SeqTrainer", "Trainer", "attach"]
_MODULES = {
    "HoldfastCallback": "trainer",
    "Seq2SeqTrainer": "trainer",
    "Trainer": "trainer",
    "attach": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    require("transformers")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
