"""A prepared loader over a stream, whose training passes the session's own loader reads.

Other passes read the framework's loader, as without Holdfast: those outside of the loop over
epochs, and those that begin while the model is in evaluation mode. They begin at the start of the
data, so no checkpoint needs a place in them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final

from holdfast.trainer.frameworks.program_loop.loader import Iterate, ResumedEpoch, WrappedLoader
from holdfast.trainer.frameworks.program_loop.order import Batches, Generators, Start
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.streamed import check_evaluated
from holdfast.trainer.streams.loader import EpochStream

EVALUATION: Final = (
    "a stream while the model is in evaluation mode, whose samples no resume could find again; "
    "call model.train() before the loop over the training data"
)
LATE: Final = (
    "a stream that was prepared after the run has resumed, so no checkpoint has its position; "
    "prepare it before the loop over the epochs"
)
# The source, and the arguments of `Session.stream`.
Given = tuple[Any, dict[str, Any]]


class StreamedLoader(WrappedLoader):
    """Wraps a loader over a stream that a framework prepared.

    Training passes have the rest of the stream's epoch. So after a pass that the program left
    early, the next one continues there.
    """

    given: Given
    stream: EpochStream | None
    dealt: int
    skips: int
    given_in_pass: int
    length: int
    is_last: bool

    def __init__(
        self, inner: Any, number: int, iterate: Iterate, given: Given, *, dealt: int
    ) -> None:
        """`given` is what `stream_arguments` found. `dealt` is the unit of the loader's batches."""
        super().__init__(inner, number, iterate)
        self.given, self.stream, self.dealt = given, None, dealt
        self.skips = self.given_in_pass = self.length = 0
        self.is_last = False

    # --- what an adapter implements -------------------------------------------------------

    @abstractmethod
    def moved(self, batch: Any) -> Any:
        """Return a batch on the device where the framework puts it."""

    def begin_stream(self, *, is_new: bool) -> None:
        """Called before the first batch of a training pass, or of the rest of one."""

    def end_stream(self) -> None:
        """Called when a training pass has ended, or was left."""

    @property
    @abstractmethod
    def passes_of_inner(self) -> int:
        """The number of passes that the framework's loader has counted."""

    @passes_of_inner.setter
    @abstractmethod
    def passes_of_inner(self, passes: int) -> None: ...

    @property
    def name(self) -> str:
        """The name of the stream in a checkpoint."""
        return f"stream_{self.number}"

    # --- reading --------------------------------------------------------------------------

    def open(self, session: FrameworkSession) -> None:
        """Make the session's loader, which continues where the checkpoint says."""
        source, options = self.given
        self.stream = session.stream_of_loader(source, name=self.name, **options)

    def enter(self, *, is_training: bool, is_new: bool) -> None:
        self.is_last = False
        if not is_training:
            self.problem = EVALUATION
        else:
            self.problem = LATE if self.stream is None else None
        if is_new:
            self.given_in_pass = 0

    def read(self) -> Iterator[Any]:
        if self.stream is not None and self.problem is None:
            return self._read(self.stream)
        # Also if another loader reads the dataset for training.
        check_evaluated(self.given[0])
        return iter(self.inner)

    def _read(self, stream: EpochStream) -> Iterator[Any]:
        is_new = self.given_in_pass == 0
        if is_new and stream.given and not stream.has_next():
            # The pass before was complete, and the program did not ask for one more batch.
            next(iter(stream), None)
        batches = iter(stream)
        skips, self.skips = self.skips, 0
        for _ in range(skips):
            next(batches, None)
        self.begin_stream(is_new=is_new)
        try:
            for batch in batches:
                self.given_in_pass += 1
                self.is_last = not stream.has_next()
                yield self.moved(batch)
        finally:
            self.end_stream()

    def find_problem(self) -> str | None:
        return EVALUATION

    def install(self) -> Batches:
        raise AssertionError("a stream has no batch sampler")

    def is_at_end(self, done: int) -> bool:
        return self.is_last

    def exhaust(self, batches: Iterator[Any]) -> None:
        """Ask for one more batch, as the program does, so that the stream's epoch ends."""
        next(batches, None)

    # --- the place ------------------------------------------------------------------------

    @property
    def pass_length(self) -> int:
        return self.length

    @property
    def can_skip(self) -> bool:
        return self.problem is None

    @property
    def unit(self) -> int:
        return self.dealt

    def start_of(self, resumed: ResumedEpoch, now: Generators | None = None) -> Start:
        """Return nothing to do: the stream is at its place."""
        return Start()

    def start_at(self, start: Start) -> None:
        self.skips = start.skip

    def before_pass(self) -> None:
        """Nothing is kept between passes but the stream's place."""

    def end_pass(self, generators: Generators) -> None:
        super().end_pass(generators)
        self.length, self.given_in_pass = self.given_in_pass, 0

    def describe(
        self, *, done: int, is_ending: bool = False, is_under_way: bool = False
    ) -> dict[str, Any]:
        return {
            "iteration": self.passes_of_inner,
            "has_begun": self.has_begun,
            "passes": self.passes,
            "done": done,
            "length": self.length,
            "in_pass": self.given_in_pass,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.passes_of_inner, self.has_begun = int(saved["iteration"]), bool(saved["has_begun"])
        if "in_pass" not in saved:
            return
        self.passes, self.length = int(saved["passes"]), int(saved["length"])
        self.given_in_pass = int(saved["in_pass"])
        if self.passes or saved["done"]:
            self.resumed = ResumedEpoch(passes=self.passes, done=int(saved["done"]))
