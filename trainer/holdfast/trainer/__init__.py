"""Code that runs inside the job: session, checkpoint engine, flusher, resume and data order.

Importing this package does not import torch, so that the flusher starts in a fraction of a second.
Public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.trainer.data.sampler import ElasticSampler
    from holdfast.trainer.loading.checkpoint import load_checkpoint
    from holdfast.trainer.session.session import Session
    from holdfast.trainer.sources.pretrained import load_pretrained

# One import name only: under a second one every class would exist twice.
if __name__ != "holdfast.trainer":
    raise ImportError(
        f"import holdfast.trainer, not {__name__}: the folder is a part of the package"
    )

__all__ = ["ElasticSampler", "Session", "load_checkpoint", "load_pretrained"]
_MODULES = {
    "ElasticSampler": "data.sampler",
    "Session": "session.session",
    "load_checkpoint": "loading.checkpoint",
    "load_pretrained": "sources.pretrained",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from holdfast.trainer.process.collector import pause_collection

        # The imports make many objects and no garbage.
        with pause_collection():
            return getattr(import_module(f"holdfast.trainer.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
