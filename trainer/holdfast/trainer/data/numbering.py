"""Finds Python's `enumerate` over batches that begins at 0 in the middle of an epoch.

`for i, batch in enumerate(loader)` is how most programs number their batches. After a resume inside
an epoch, the loader gives the rest of the epoch, and `i` begins at 0. Then `if i % accumulation`
is true for other batches than in an uninterrupted run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any, Final

from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler

RESTARTED: Final = (
    "enumerate() numbers the batches from 0, although this resume is inside an epoch, after batch "
    "{before}. What the program does by that number differs from an uninterrupted run. Use `for i, "
    "batch in session.enumerate(loader)`, or pass session.first_batch to enumerate() as the start"
)


def has_restarted(before: int, per_step: int) -> bool:
    """Return True if an `enumerate` of the program began at 0 after `before` batches of an epoch.

    Call it at the end of the first step, of `per_step` batches, from where the program asks for its
    next batch.
    """
    running = list(_frames())
    for one in gc.get_objects():
        if type(one) is not enumerate:
            continue
        arguments: Any = one.__reduce__()[1]
        iterator, count = arguments
        if isinstance(iterator, GeneratorType):
            # The generator that gives the batches, or one around it such as tqdm's.
            is_ours = any(frame is iterator.gi_frame for frame in running)
        else:
            is_ours = _gives_ours(iterator)
        if is_ours and count < before + per_step:
            return True
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _gives_ours(iterator: Any) -> bool:
    """Return True for the iterator of a loader that has a sampler of a session."""
    loader = getattr(iterator, "_index_sampler", None)
    samplers = (loader, getattr(loader, "sampler", None))
    return any(isinstance(each, ElasticSampler | ElasticDistributedSampler) for each in samplers)
