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
        HoldfastCallback,
        Seq2SeqTrainer,
        Trainer,
        attach,
    )

__all__ = ["HoldfastCallback", "Seq2SeqTrainer", "Trainer", "attach"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    require("transformers")
    return getattr(import_module(f"{__name__}.trainer"), name)
