"""The batch sampler of a loader that Accelerate prepared.

Accelerate fetches one batch ahead. So when a checkpoint is saved, the next batch has already been
fetched, and a dataset may have drawn random numbers for it. The generators are therefore noted
before each fetch in this process. After a resume, that batch is fetched with the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.data_loader import SkipBatchSampler

from holdfast.trainer.frameworks.program_loop.order import DATA, Batches, Generators, Start
from holdfast.trainer.state import rng


class DealtBatches(Batches):
    """The batches that Accelerate deals out to the ranks.

    All ranks draw the same order, so a checkpoint keeps the order of one rank. `fetch` are the
    generators before the newest fetch, noted unless worker processes fetch.
    """

    def __init__(self, inner: Any, *, notes_fetches: bool) -> None:
        super().__init__(inner)
        self._notes_fetches = notes_fetches
        self.fetch: rng.Noted | None = None
        self._data_fetch: Mapping[str, Any] = {}

    @property
    def unit(self) -> int:  # type: ignore[override]
        """How many dealt batches make one batch of each rank."""
        if getattr(self._inner, "split_batches", False):
            return 1
        return int(getattr(self._inner, "num_processes", 1))

    @property
    def even_batches(self) -> bool:
        """As of the wrapped sampler."""
        return bool(self._inner.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._inner.even_batches = value

    def states_of(self, start: Start) -> list[Generators]:
        """Return the generators before the second fetch, and before the first."""
        return [start.now, start.fetch or start.now]

    def note_fetch(self) -> None:
        """Note the generators, unless worker processes fetch."""
        if not self._notes_fetches:
            return
        self.fetch = rng.note()
        if not self.data.is_idle:
            self._data_fetch = self.data.before_fetch()

    def before_newest_fetch(self) -> Generators | None:
        """Return the generators before the newest fetch, if they were noted."""
        if self.fetch is None:
            return None
        return {**rng.as_tensors(self.fetch), DATA: self._data_fetch}

    def skipped(self, start: Start) -> Iterator[Any]:
        """Return the batches from `start` on, as this number of ranks shares them."""
        if not start.is_dealt:
            return super().skipped(start)
        # The ranks' number has changed, so they share the rest of the dealt batches again.
        inner = copy.copy(self._inner)
        inner.batch_sampler = SkipBatchSampler(self._inner.batch_sampler, start.skip)
        return iter(inner)
