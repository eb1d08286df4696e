"""A drop-in for `torch.distributed.checkpoint`: `from holdfast.trainer import dcp`.

`save`, `async_save` and `load` have the parameters of stock DCP, and use Holdfast's engine: the
state is copied into staging slots, the flusher writes it, and a manifest with checksums commits it.
Every other name, such as `FileSystemReader` or `state_dict`, is stock DCP's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import torch.distributed.checkpoint as stock

from holdfast.trainer.dcp.loading import load
from holdfast.trainer.dcp.saving import async_save, save

# Names that stock DCP has only in its submodules.
_ELSEWHERE: Final = {
    "AsyncCheckpointerType": "state_dict_saver",
    "AsyncSaveResponse": "state_dict_saver",
    "Stateful": "stateful",
}
__all__ = ["async_save", "load", "save"]


def __getattr__(name: str) -> Any:
    """Return stock DCP's attribute."""
    if name in _ELSEWHERE:
        return getattr(import_module(f"{stock.__name__}.{_ELSEWHERE[name]}"), name)
    try:
        return getattr(stock, name)
    except AttributeError:
        text = f"module {__name__!r} has no attribute {name!r}, and neither has {stock.__name__!r}"
        raise AttributeError(text) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(stock), *_ELSEWHERE})
