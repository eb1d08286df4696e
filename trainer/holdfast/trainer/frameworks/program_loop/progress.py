"""The place of a program in its loaders: the passes under way, and the counters of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.program_loop.loader import ENDS, WrappedLoader
from holdfast.trainer.frameworks.program_loop.order import DATA_OF_LOADERS, Generators
from holdfast.trainer.state import rng

# The key of the sums beside those of the loaders, which are numbers.
TOTALS: Final = "totals"


@dataclass(eq=False)
class Pass:
    """One iteration over a loader. It is a training pass once an optimizer step ended in it.

    `done` are the dealt batches that were given out or skipped. `counted` of them are in the run's
    total.
    """

    loader: WrappedLoader
    done: int
    counted: int
    is_training: bool = False
    is_over: bool = False
    # True if a step of the current epoch ended in it.
    is_of_epoch: bool = False


class LoopProgress:
    """What a checkpoint keeps of the loaders and counters, the same on all ranks.

    `prepare` is the call that prepares loaders, for messages.
    """

    def __init__(self, device: torch.device, *, prepare: str) -> None:
        self._prepare = prepare
        self.loaders: list[WrappedLoader] = []
        self.totals = EpochTotals(device)
        self.was_restored = False
        self._trained = 0
        self._active: list[Pass] = []
        # The passes under way at the optimizer step that is not complete yet.
        self._stepping: tuple[Pass, ...] = ()
        # What a checkpoint has of the loaders, including those that are prepared later.
        self._saved: list[Mapping[str, Any]] = []
        self._saved_rank: Mapping[str, Any] = {}
        # The loader of a pass that is left out, until the program asks for a batch.
        self._left_out: WrappedLoader | None = None
        # The generators when a pass began after the last step of another one.
        self._at_end: Generators | None = None
        # The loader whose training pass was complete last, and has the generators of the process.
        self._newest_end: WrappedLoader | None = None
        # The loaders that were prepared before the loop. Those of an epoch end with it.
        self._kept: int | None = None

    @property
    def is_in_pass(self) -> bool:
        return bool(self._active)

    @property
    def in_training(self) -> list[WrappedLoader]:
        """The loaders whose training passes are under way."""
        return [one.loader for one in self._active if one.is_training and not one.is_over]

    @property
    def has_stepped(self) -> bool:
        return bool(self._stepping)

    @property
    def trained(self) -> int:
        """The number of batches per rank that the run was trained on."""
        return self._trained // self._unit

    @property
    def first_batch(self) -> int:
        """The number, from 0, of the first batch that the epoch's next training pass gives.

        For a pass that is left out, because it was complete, it is the number of its batches.
        """
        if self._left_out is not None:
            return self._left_out.pass_length
        for loader in self.loaders:
            resumed = loader.resumed
            if resumed is not None and resumed.passes:
                return loader.pass_length
            if resumed is not None and resumed.done:
                return resumed.done // loader.unit
        return 0

    def add(self, loader: WrappedLoader) -> None:
        """Add a prepared loader. It gets its restored place if a checkpoint has one for it."""
        self.loaders.append(loader)
        self._restore(loader)

    def begin_loop(self) -> None:
        """Begin the loop over epochs. Loaders that are prepared in an epoch end with it."""
        self._kept = len(self.loaders)

    def begin(self, loader: WrappedLoader, done: int) -> Pass:
        self._left_out = None
        one = Pass(loader, done, done)
        self._active.append(one)
        return one

    def leave_out(self, loader: WrappedLoader, now: Generators) -> Iterator[Any]:
        """Return a pass without batches, for one that was complete before the resume.

        The generators are then as they were at its end. `now` are those of the resume.
        """
        if (at_end := loader.leave_out_pass(now)) is not None:
            self._restore_generators(at_end)
        self._left_out = loader
        return self._nothing()

    def _nothing(self) -> Iterator[Any]:
        self._left_out = None
        yield from ()

    def end(self, one: Pass) -> None:
        """End a pass. A training pass that the program left early is over for this epoch."""
        self._active.remove(one)
        if one.is_of_epoch or one in self._stepping:
            self._finish(one)

    def note_new_pass(self) -> None:
        """Note the generators when a pass begins after the last step of another one.

        A program that asks for batches by `next` does not ask for one more. Its evaluation then
        begins here, and a resume runs it again.
        """
        at_end = [one.loader.is_at_end(one.done) for one in self._stepping]
        if at_end and all(at_end) and self._at_end is None:
            self._at_end = self.generators()

    def forget_new_pass(self) -> None:
        """Forget what `note_new_pass` noted: the pass was inside of the step."""
        self._at_end = None

    def note_step(self) -> None:
        """Note an optimizer step. Raises `SpecError` where no resume could find its place."""
        if not self._active:
            raise SpecError(
                "an optimizer step outside of a loop over a prepared loader; expected a loop over "
                f"a DataLoader that {self._prepare} returned, and not over a loader made of it"
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
        is_at_end = False
        for one in stepping:
            one.is_training = one.is_of_epoch = one.loader.has_trained = True
            is_at_end = one.loader.is_at_end(one.done)
            if is_at_end:
                self._finish(one)
        self._count(stepping[-1])
        self._at_end = None
        return is_at_end

    def next_epoch(self) -> None:
        """Forget the passes of the epoch, whose end is complete, and the loaders made in it."""
        del self.loaders[self._kept :]
        self._saved, self._saved_rank = [], {}
        for loader in self.loaders:
            loader.next_epoch()
        self._left_out = None
        for one in self._active:
            one.is_of_epoch = False
        self.totals.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {
            "trained": self._trained,
            "loaders": [self._describe(loader) for loader in self.loaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.was_restored = True
        self._trained = state["trained"]
        self._saved = state["loaders"]
        for loader in self.loaders:
            self._restore(loader)

    def load_rank(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint keeps of this rank, by the numbers of the loaders, as text."""
        self._saved_rank = state
        for loader in self.loaders:
            loader.restore_rank(state.get(str(loader.number), {}))

    def describe_rank(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank, by the numbers of the loaders, as text.

        The generators at the end of a pass that was complete just now are those of the process.
        """
        training, noted = self.in_training, {}
        for loader in self.loaders:
            is_newest = loader is self._newest_end and not training
            ends = loader.ends[:-1] if is_newest else loader.ends
            state = loader.describe_rank(is_training=loader in training)
            state |= {ENDS: [dict(each) for each in ends]} if ends else {}
            if state:
                noted[str(loader.number)] = state
        return noted

    def generators(self) -> Generators:
        """Return the generators of the process, and of the data of all loaders."""
        known = [(str(each.number), each.batches) for each in self.loaders]
        data = {number: one.data.state_dict() for number, one in known if one is not None}
        return {**rng.capture(), DATA_OF_LOADERS: data}

    def _restore_generators(self, generators: Generators) -> None:
        rng.restore(generators)
        data = generators.get(DATA_OF_LOADERS, {})
        for each in self.loaders:
            if each.batches is not None:
                each.batches.data.load_state_dict(data.get(str(each.number), {}))

    def _restore(self, loader: WrappedLoader) -> None:
        if loader.number < len(self._saved):
            loader.restore(self._saved[loader.number])
            loader.restore_rank(self._saved_rank.get(str(loader.number), {}))

    def _describe(self, loader: WrappedLoader) -> dict[str, Any]:
        passes = [one for one in self._active if one.loader is loader]
        done = [one.done for one in passes if one.is_training and not one.is_over]
        resumed = loader.resumed.done if loader.resumed is not None else 0
        return loader.describe(
            done=max(done, default=resumed),
            is_ending=any(one.is_over for one in passes),
            is_under_way=bool(done),
        )

    @property
    def _unit(self) -> int:
        # A loader of an evaluation may have another unit than that of the training.
        trained = (one for one in self.loaders if one.has_trained or one.resumed is not None)
        found = next(trained, self.loaders[0] if self.loaders else None)
        return 1 if found is None else found.unit

    def _finish(self, one: Pass) -> None:
        if not one.is_over:
            one.is_over = True
            one.loader.end_pass(self._at_end or self.generators())
            self._newest_end = one.loader if self._at_end is None else None
            self._count(one)

    def _count(self, one: Pass) -> None:
        self._trained += one.done - one.counted
        one.counted = one.done


class EpochTotals:
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
        self.values = [value.to(self._device) for value in values]
        self._given = 0


class RankProgress:
    """This rank's sums, and the random states of its loaders.

    At another number of ranks they are left out, because each rank then has other batches.
    """

    is_of_one_size = True

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the states by the numbers of the loaders, as text.

        Without states there is an entry that nobody uses. The size is then mostly the same, so
        saves need no new plan.
        """
        noted = self._progress.describe_rank()
        return {TOTALS: self._progress.totals.values, **(noted or {"": rng.as_tensors(rng.note())})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each loader the states with which it continues."""
        self._progress.totals.restore(state.get(TOTALS, []))
        self._progress.load_rank(state)
