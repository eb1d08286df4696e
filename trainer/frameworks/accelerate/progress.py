"""The place of a program in its loaders: the passes under way, and the counters of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.accelerate.loaders import Loader
from holdfast.trainer.state import rng

# The key of the sums beside those of the loaders, which are numbers.
TOTALS: Final = "totals"


@dataclass(eq=False)
class Pass:
    """One iteration over a loader. It is a training pass once an optimizer step ended in it.

    `done` are the dealt batches that were given out or skipped. `counted` of them are in the run's
    total.
    """

    loader: Loader
    done: int
    counted: int
    is_training: bool = False
    is_over: bool = False


class Progress:
    """What a checkpoint keeps of Accelerate's own state, the same on all ranks.

    It is the object `accelerate` of the session's extras.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.loaders: list[Loader] = []
        self.totals = Totals(accelerator.device)
        self.was_restored = False
        self._trained = 0
        self._active: list[Pass] = []
        # The passes under way at the optimizer step that is not complete yet.
        self._stepping: tuple[Pass, ...] = ()
        self._saved: list[Mapping[str, Any]] = []

    @property
    def is_in_pass(self) -> bool:
        """True while a loader is being iterated."""
        return bool(self._active)

    @property
    def in_training(self) -> list[Loader]:
        """The loaders whose training passes are under way."""
        return [one.loader for one in self._active if one.is_training and not one.is_over]

    @property
    def has_stepped(self) -> bool:
        """True from an optimizer step until that step is complete."""
        return bool(self._stepping)

    @property
    def trained(self) -> int:
        """The number of batches per rank that the run was trained on."""
        return self._trained // self._unit

    @property
    def first_batch(self) -> int:
        """The number, from 0, of the first batch that the epoch's next training pass gives."""
        left = [each.resumed.done for each in self.loaders if each.resumed is not None]
        return max(left, default=0) // self._unit

    def add(self, loader: Loader) -> None:
        """Add a prepared loader. It gets its restored place if a checkpoint has one for it."""
        self.loaders.append(loader)
        if loader.number < len(self._saved):
            loader.restore(self._saved[loader.number])

    def begin(self, loader: Loader, done: int) -> Pass:
        """Begin a pass after `done` dealt batches."""
        one = Pass(loader, done, done)
        self._active.append(one)
        return one

    def end(self, one: Pass) -> None:
        """End a pass. A training pass that the program left early is over for this epoch."""
        self._active.remove(one)
        if one.is_training or one in self._stepping:
            self._finish(one)

    def note_step(self) -> None:
        """Note an optimizer step. Raises `SpecError` where no resume could find its place."""
        if not self._active:
            raise SpecError(
                "an optimizer step outside of a loop over a prepared loader; expected a loop over "
                "a DataLoader that accelerator.prepare returned"
            )
        problem = self._active[-1].loader.problem
        if problem is not None:
            raise SpecError(f"an optimizer step in a loop over {problem}")
        self._stepping = tuple(self._active)

    def ends_step(self, one: Pass) -> bool:
        """Return True if a request for the next batch of the pass completes a step."""
        return one in self._stepping

    def close_step(self) -> bool:
        """Complete the step. Return True if it is the last of its training pass."""
        stepping, self._stepping = self._stepping, ()
        for one in stepping:
            one.is_training = True
            if one.loader.end_of_dataloader:
                self._finish(one)
        innermost = stepping[-1]
        self._count(innermost)
        return bool(innermost.loader.end_of_dataloader)

    def next_epoch(self) -> None:
        """Forget the passes of the epoch, whose end is complete."""
        for loader in self.loaders:
            loader.passes, loader.resumed = 0, None
        self.totals.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        return {
            "accumulation": int(self._accelerator.step),
            "saves": int(self._accelerator.project_configuration.iteration),
            "trained": self._trained,
            "loaders": [self._describe(loader) for loader in self.loaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters, and the places of the loaders."""
        self.was_restored = True
        self._accelerator.step = state["accumulation"]
        self._accelerator.project_configuration.iteration = state["saves"]
        self._trained = state["trained"]
        self._saved = state["loaders"]
        for loader, saved in zip(self.loaders, self._saved, strict=False):
            loader.restore(saved)

    def _describe(self, loader: Loader) -> dict[str, Any]:
        passes = [one for one in self._active if one.loader is loader]
        done = [one.done for one in passes if one.is_training and not one.is_over]
        resumed = loader.resumed.done if loader.resumed is not None else 0
        return loader.describe(
            done=max(done, default=resumed), is_ending=any(one.is_over for one in passes)
        )

    @property
    def _unit(self) -> int:
        return self.loaders[0].unit if self.loaders else 1

    def _finish(self, one: Pass) -> None:
        if not one.is_over:
            one.is_over = True
            one.loader.passes += 1
            self._count(one)

    def _count(self, one: Pass) -> None:
        self._trained += one.done - one.counted
        one.counted = one.done


class Totals:
    """The sums over the batches of an epoch that the program keeps, in the order of its calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.values: list[torch.Tensor] = []
        self._given = 0

    def give(self) -> torch.Tensor:
        """Return the next sum of this epoch: zero, or as it was restored."""
        if self._given == len(self.values):
            self.values.append(torch.zeros((), device=self._device))
        self._given += 1
        return self.values[self._given - 1]

    def next_epoch(self) -> None:
        """Begin again with zeros. There are as many, so saves need no new plan."""
        self.values = [torch.zeros_like(value) for value in self.values]
        self._given = 0

    def restore(self, values: list[torch.Tensor]) -> None:
        """Set the sums that the program gets in this epoch."""
        self.values = [value.to(self._device) for value in values]
        self._given = 0


class Fetches:
    """This rank's sums, and its generators before its newest fetch from each loader in training.

    At another number of ranks they are left out, because each rank then has other batches.
    """

    is_of_one_size = True

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the generators by the numbers of the loaders, as text.

        Between two passes there is an entry that nobody uses. The size is then always the same, so
        saves need no new plan.
        """
        noted = {
            str(loader.number): rng.as_tensors(loader.batches.fetch)
            for loader in self._progress.in_training
            if loader.batches is not None and loader.batches.fetch is not None
        }
        return {TOTALS: self._progress.totals.values, **(noted or {"": rng.as_tensors(rng.note())})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each loader the generators with which its next batch was fetched."""
        self._progress.totals.restore(state.get(TOTALS, []))
        for loader in self._progress.loaders:
            if loader.resumed is not None:
                loader.resumed.fetch = state.get(str(loader.number))
