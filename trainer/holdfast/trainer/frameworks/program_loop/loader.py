"""Prepared loaders that report each batch, so that a checkpoint knows the place in the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch.utils.data import IterableDataset

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.frameworks.program_loop.order import (
    DATA,
    DATA_OF_LOADERS,
    Batches,
    Generators,
    LoaderOrder,
    Start,
)
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.state import rng

_OWN: Final = frozenset(
    {
        *("inner", "number", "batches", "problem", "resumed", "passes", "ends", "has_begun"),
        *("has_trained", "_iterate"),
        # Of loaders over streams.
        *("given", "stream", "dealt", "skips", "given_in_pass", "length", "is_last"),
        *("passes_of_inner", "global_batch"),
    }
)
# The key of the generators at the ends of an epoch's training passes.
ENDS: Final = "ends"
Iterate = Callable[[Any, int], Iterator[Any]]
B = TypeVar("B", bound=Batches)


@dataclass
class ResumedEpoch:
    """What is left of the restored epoch: `passes` were complete, and `done` batches of the next.

    `done` counts batches dealt out to the ranks. `order` is None if the pass began by the program's
    own resume, in an order that is drawn again.
    """

    passes: int = 0
    done: int = 0
    order: LoaderOrder | None = None
    fetch: Generators | None = None


class WrappedLoader(ABC):
    """Wraps a loader that a framework prepared. Attributes and the class are the wrapped loader's.

    `passes` counts the complete training passes of the epoch, and `ends` are the generators at
    their ends. `has_begun` is true from the first pass of the run on, and `has_trained` from the
    first training pass on. `problem` says why training over the loader cannot be continued, or is
    None. `iterate` runs a pass, given the loader and the number of batches to skip.
    """

    inner: Any
    number: int
    batches: Batches | None
    problem: str | None
    resumed: ResumedEpoch | None
    passes: int
    ends: list[Generators]
    has_begun: bool
    has_trained: bool
    _iterate: Iterate

    def __init__(self, inner: Any, number: int, iterate: Iterate) -> None:
        self.inner, self.number, self._iterate = inner, number, iterate
        self.problem = self.find_problem()
        self.batches = None if self.problem else self.install()
        if self.batches is not None:
            self.batches.data.watch(inner)
        self.resumed, self.passes, self.ends = None, 0, []
        self.has_begun = self.has_trained = False

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self, 0)

    def __len__(self) -> int:
        return len(self.inner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # The program's `isinstance` checks stay true.
        return self.inner.__class__

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    # --- what a framework's loader implements ---------------------------------------------

    def find_problem(self) -> str | None:
        """Return why training over the loader cannot be continued, or None."""
        return problem_of(self.inner)

    @abstractmethod
    def install(self) -> Batches:
        """Wrap the loader's batch sampler in place, and return the wrapper."""

    @abstractmethod
    def is_at_end(self, done: int) -> bool:
        """Return True if no batch follows the newest of a pass, after `done` dealt batches."""

    @abstractmethod
    def exhaust(self, batches: Iterator[Any]) -> None:
        """Let a pass at its end draw what it draws there, before its last step is complete.

        Torch's `RandomSampler` draws once more from a generator that the program gave it.
        """

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what a checkpoint keeps, the same on all ranks. Raises `CheckpointError`."""

    def restore_rank(self, saved: Mapping[str, Any]) -> None:
        self.ends = list(saved.get(ENDS, []))
        if self.batches is not None:
            self.batches.data.load_state_dict(saved.get(DATA, {}))

    @abstractmethod
    def describe(self, *, done: int, is_ending: bool, is_under_way: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on all ranks.

        `done` are the dealt batches of a training pass that is under way, or 0. With `is_ending`,
        the pass is complete and the program has not left it yet.
        """

    def describe_rank(self, *, is_training: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank beside the ends of its passes.

        With `is_training`, a training pass is under way.
        """
        data = {} if self.batches is None else self.batches.data.state_dict()
        return {DATA: data} if data else {}

    @abstractmethod
    def before_pass(self) -> None:
        """Called when the next pass begins at another place than its first batch."""

    def open(self, session: FrameworkSession) -> None:  # noqa: B027 (most loaders need nothing)
        """Called when the session is open, before the first pass of training."""

    def enter(self, *, is_training: bool, is_new: bool) -> None:  # noqa: B027
        """Called before a pass, or with `is_new` false before the rest of a restored one.

        `is_training` is true in the loop over epochs while a model is in training mode.
        """

    def read(self) -> Iterator[Any]:
        """Begin the pass and return its batches."""
        return iter(self.inner)

    # --- the place ------------------------------------------------------------------------

    @property
    def pass_length(self) -> int:
        """The number of batches of a complete pass on this rank."""
        return len(self)

    @property
    def can_skip(self) -> bool:
        """True if a pass can begin after some of its batches."""
        return self.batches is not None

    @property
    def unit(self) -> int:
        """How many dealt batches make one batch of each rank."""
        return 1 if self.batches is None else self.batches.unit

    def start_at(self, start: Start) -> None:
        assert self.batches is not None
        self.batches.start = start
        self.before_pass()

    def start_of(self, resumed: ResumedEpoch, now: Generators | None = None) -> Start:
        """Return where the restored pass continues at this number of ranks.

        `now` are the generators with which training continues. By default, those of this moment.
        """
        assert self.batches is not None
        is_shared = resumed.done % self.unit == 0
        # The data's generators may be those at the end of a pass that was left out.
        data = (now or {}).get(DATA_OF_LOADERS, {}).get(str(self.number))
        now = {**(now or rng.capture()), DATA: data or self.batches.data.state_dict()}
        return Start(
            skip=resumed.done // self.unit if is_shared else resumed.done,
            is_dealt=not is_shared,
            order=resumed.order,
            fetch=resumed.fetch,
            now=now if resumed.order is not None else {},
        )

    def leave_out_pass(self, now: Generators) -> Generators | None:
        """Leave out a pass that was complete. Return the generators at its end, if they are known.

        `now` are the generators of the resume, for the pass that was complete last.
        """
        assert self.resumed is not None
        number = self.passes - self.resumed.passes
        self.resumed.passes -= 1
        if number == len(self.ends):
            self.ends.append(now)
        return self.ends[number] if number < len(self.ends) else None

    def end_pass(self, generators: Generators) -> None:
        """Count a complete training pass. `generators` are those at its end."""
        self.passes += 1
        self.ends.append(generators)

    def next_epoch(self) -> None:
        """Forget the passes of the epoch, whose end is complete."""
        self.passes, self.resumed, self.ends = 0, None, []

    def require_samples(self, saved: int) -> None:
        """Raise `CheckpointError` for a dataset of another size than the saved one."""
        if saved != len(self.inner.dataset):
            raise CheckpointError(
                f"loader {self.number}: its dataset had {saved} samples and now has "
                f"{len(self.inner.dataset)}, so its order cannot be continued. Use the same "
                "dataset"
            )


def problem_of(loader: Any) -> str | None:
    """Return why a loader has no place that can be restored, or None."""
    try:
        len(loader)
        has_length = not isinstance(loader.dataset, IterableDataset)
    except TypeError:
        has_length = False
    if has_length:
        return None
    return (
        f"a loader over {type(loader.dataset).__name__}, which has no length or no index, so "
        "no resume could find its place again; train over a dataset with __len__ and "
        "__getitem__, or over a stream that names its shards, as "
        "holdfast.trainer.streams.StreamDataset does"
    )


def wrap_sampler(base: Any, wrap: Callable[[Any], B]) -> B:
    """Wrap the batch sampler of a `DataLoader`, or its sampler, in place. Return the wrapper."""
    name = "sampler" if base.batch_sampler is None else "batch_sampler"
    batches = wrap(getattr(base, name))
    # A DataLoader refuses an assignment. It reads the attribute whenever an iteration begins.
    object.__setattr__(base, name, batches)
    return batches
