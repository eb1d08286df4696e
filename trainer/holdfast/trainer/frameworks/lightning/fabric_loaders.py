"""Loaders that Fabric set up, so that each batch is counted and their place can be restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.trainer.frameworks.program_loop.loader import Resumed, WrappedLoader, wrap_sampler
from holdfast.trainer.frameworks.program_loop.order import (
    Batches,
    Order,
    own_generator,
    set_generator,
)


class FabricLoader(WrappedLoader):
    """Wraps a loader of Fabric, which sets the epoch of its sampler when a pass begins.

    Ranks may draw orders of their own, so a checkpoint keeps the order of each rank.
    """

    def install(self) -> Batches:
        """Wrap the loader's batch sampler in place, and return the wrapper."""
        return wrap_sampler(self.inner._dataloader, Batches)

    def is_at_end(self, done: int) -> bool:
        """Return True if no batch follows."""
        return done >= len(self.inner)

    def exhaust(self, batches: Iterator[Any]) -> None:
        """Ask for one more batch, as the program does. There is none."""
        next(batches, None)

    def describe(self, *, done: int, is_ending: bool, is_under_way: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on all ranks.

        Fabric counts a pass when it begins. One that is under way begins again.
        """
        begun = {
            "iteration": int(self.inner._num_iter_calls) - is_under_way,
            "has_begun": self.has_begun,
        }
        if self.batches is None:
            return begun
        samples = len(self.inner.dataset)
        return {**begun, "samples": samples, "passes": self.passes, "done": done}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `describe` returned. Raises `CheckpointError` for another dataset."""
        self.inner._num_iter_calls = int(saved["iteration"])
        self.has_begun = bool(saved["has_begun"])
        if self.batches is None or "samples" not in saved:
            return
        self.require_samples(saved["samples"])
        self.passes = int(saved["passes"])
        if self.passes or saved["done"]:
            self.resumed = Resumed(passes=self.passes, done=int(saved["done"]))

    def before_pass(self) -> None:
        """Fabric keeps no iterator between passes."""

    def describe_rank(self, *, is_training: bool) -> dict[str, Any]:
        """Return the order of the newest pass, and the state of the sampler's own generator."""
        if self.batches is None:
            return {}
        generator = own_generator(self.batches.sampler_of_ids)
        now = {} if generator is None else {"generator": generator.get_state()}
        own = self.batches.order.own
        return {
            **super().describe_rank(is_training=is_training),
            "order": dict(self.batches.order.process),
            **({} if own is None else {"own": own}),
            **now,
        }

    def restore_rank(self, saved: Mapping[str, Any]) -> None:
        """Restore what `describe_rank` returned, and the ends of passes."""
        super().restore_rank(saved)
        if self.batches is None or "order" not in saved:
            return
        if "generator" in saved:
            set_generator(self.batches.sampler_of_ids, saved["generator"].clone())
        self.batches.order = Order(saved["order"], saved.get("own"))
        if self.resumed is not None:
            self.resumed.order = self.batches.order
