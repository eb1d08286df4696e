"""A source as an `IterableDataset`, for programs whose framework takes a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from holdfast.trainer.streams.convert import as_source


class StreamDataset(IterableDataset[Any]):
    """A source with the arguments of `Session.stream` that belong to the data.

    Give it to a framework, as in `DataLoader(StreamDataset(source, shuffle=True), batch_size=4)`.
    The adapter reads it as `Session.stream` does. Without an adapter, and in an evaluation, an
    iteration gives all samples in the order of the source.
    """

    def __init__(
        self,
        source: Any,
        *,
        transform: Callable[[Any], Any] | None = None,
        shuffle: bool = False,
        buffer: int = 1000,
        open_shards: int = 1,
        seed: int | None = None,
    ) -> None:
        """Takes what `Session.stream` takes as a source, and its arguments of these names."""
        super().__init__()
        self.source, self.transform = source, transform
        self.options: dict[str, Any] = {
            "shuffle": shuffle,
            "buffer": buffer,
            "open_shards": open_shards,
            "seed": seed,
        }

    def __iter__(self) -> Iterator[Any]:
        source, info = as_source(self.source), get_worker_info()
        names, finish = source.shards(), getattr(source, "finish_sample", None)
        for name in names if info is None else names[info.id :: info.num_workers]:
            for sample, _ in source.open(name, None):
                found = sample if finish is None else finish(sample)
                yield found if self.transform is None else self.transform(found)
