"""Streams without shards, whose former batches a resume reads again, and what excludes that."""

from __future__ import annotations

import pickle
import random
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves

from holdfast.contracts.disk.digests import RunningDigest
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.frameworks.streamed import WAY_OUT

# Bytes at each end of a tensor that count. Whole batches of images would take milliseconds.
_END_BYTES: Final = 4096
# Lightning fetches a batch ahead.
_KEPT: Final = 4


class NotedStreams(CombinedLoader):
    """Streams whose batches are noted, so that a resume knows whether it reads the same ones.

    `digests` has the digest of an epoch's batches up to each of the last ones, by their number.
    """

    digests: dict[int, str]

    def begin_epoch(self) -> None:
        """Forget the batches of the epoch before."""
        self.digests = {0: ""}

    def __next__(self) -> Any:
        found = super().__next__()
        number, before = list(self.digests.items())[-1]
        self.digests[number + 1] = digest_of_batch(before, found[0])
        self.digests.pop(number + 1 - _KEPT, None)
        return found

    def require_same(self, trained: int, saved: str) -> None:
        """Raise `CheckpointError` if the first `trained` batches are not those of the digest."""
        if saved and self.digests.get(trained) != saved:
            names = ", ".join(sorted({data_name(each) for each in self.flattened}))
            raise CheckpointError(
                f"the training stream {names} gave other samples when the first {trained} batches "
                f"of the epoch were read again, so no resume can continue in it; {WAY_OUT}"
            )


class WatchedStreams(NotedStreams):
    """Streams that this process reads, and that must not draw from the global generators.

    The model draws from them between two batches, so batches that are read again would differ.
    """

    def __next__(self) -> Any:
        before = _global_states()
        batch = super().__next__()
        if _global_states() != before:
            names = ", ".join(sorted({data_name(each) for each in self.flattened}))
            raise SpecError(
                f"the training stream {names} draws from the global random generators while its "
                "samples are read, and the model draws from them in between, so no resume could "
                "read the same samples again. Give the stream a generator of its own, as an "
                "attribute of the dataset, or read it in worker processes (num_workers=1 or more)"
            )
        return batch


def digest_of_batch(before: str, batch: Any) -> str:
    """Return a digest of a batch and of those before it. Of a large tensor, the ends count."""
    running = RunningDigest(before.encode())
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            running.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                flat = leaf.detach().reshape(-1)
                ends = max(1, _END_BYTES // leaf.element_size())
                for part in (flat[:ends], flat[-ends:]):
                    running.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float | None):
            running.update(repr(leaf).encode())
        else:
            running.update(type(leaf).__name__.encode())
    return str(running.hexdigest())


def data_name(loader: Any) -> str:
    """Return the name of a loader's dataset, or of another iterable."""
    return type(getattr(loader, "dataset", loader)).__qualname__


def _global_states() -> tuple[Any, ...]:
    """Return the states of the global generators of the CPU, from which streams draw."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), pickle.dumps(np.random.get_state())
