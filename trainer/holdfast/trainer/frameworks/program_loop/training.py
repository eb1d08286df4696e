"""The training of one program: its session, its epochs and the end of each step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.frameworks.program_loop.loader import ResumedEpoch, WrappedLoader
from holdfast.trainer.frameworks.program_loop.order import Generators, Start
from holdfast.trainer.frameworks.program_loop.progress import LoopProgress, RankProgress
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.state.not_restored import warn_of_lost_states


@dataclass(frozen=True, kw_only=True)
class Words:
    """How messages name a framework, its object in the program, and the call that prepares."""

    framework: str
    owner: str
    prepare: str


@dataclass(kw_only=True)
class Parts:
    """What a framework has prepared, as arguments of a `Session`."""

    optimizers: list[Any]
    schedulers: list[Any]
    extra: dict[str, Any]


class LoopTraining(ABC):
    """Connects a framework's objects to a `Session`.

    The session is opened by the first call that needs it. By then the program has prepared and
    registered all its objects. An adapter implements `parts` and `end`.
    """

    words: ClassVar[Words]
    # The names of the extra and of the object per rank in a checkpoint.
    shared_name: ClassVar[str]
    rank_name: ClassVar[str]
    _has_trained: ClassVar[bool] = False

    def __init__(self, progress: LoopProgress, options: Mapping[str, Any]) -> None:
        """`options` are further arguments of the `Session`."""
        self.progress, self._options = progress, dict(options)
        self.session: FrameworkSession | None = None
        self._is_looping = self._has_looped = self._ignores_steps = self._is_closed = False
        # The generators of the resume, until the restored pass continues.
        self._resumed_generators: Generators | None = None

    # --- what an adapter implements -------------------------------------------------------

    @abstractmethod
    def models(self) -> list[nn.Module]:
        """Return the prepared models."""

    def wrappers(self) -> list[nn.Module]:
        """Return the modules that the program calls, which synchronize gradients."""
        return self.models()

    @abstractmethod
    def parts(self) -> Parts:
        """Return the prepared objects. Raises `SpecError` if they cannot be saved here."""

    @abstractmethod
    def end(self) -> None:
        """End the training, as the program does at its end. It calls `close`."""

    @abstractmethod
    def after_boundary(self, session: FrameworkSession) -> None:
        """Called after each step, each epoch and at the end."""

    # --- start and end --------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.session is not None and not self._is_closed

    @property
    def saves(self) -> bool:
        """True from the start of the loop until the session is closed: it saves for the program."""
        return self.is_open and self._has_looped

    def start(self, start_from: Path | None = None) -> FrameworkSession:
        """Open the session, which resumes. Later calls return it.

        Raises `SpecError` if the program's objects cannot be saved here or for a second training,
        `CheckpointError` for a checkpoint of another framework, and as `Session` does.
        """
        if self.session is not None:
            return self.session
        if LoopTraining._has_trained:
            raise self._second_training()
        parts, options = self.parts(), dict(self._options)
        extra = {self.shared_name: self.progress, **parts.extra, **options.pop("extra", {})}
        mine = {self.rank_name: RankProgress(self.progress), **options.pop("per_rank", {})}
        models = self.models()
        session = FrameworkSession(
            one_model(models),
            parts.optimizers,
            parts.schedulers,
            extra=extra,
            per_rank=mine,
            start_from=start_from,
            **options,
        )
        if session.rank == 0:
            # The session got the models without some of their wrappers.
            warn_of_lost_states(each for each in self.wrappers() if each not in models)
        is_excluded = f"extra.{self.shared_name}" in listed(options.get("exclude", ()))
        if session.resumed_from is not None and not (self.progress.was_restored or is_excluded):
            with session:
                raise CheckpointError(
                    f"{session.resumed_from} was not saved by {self.words.framework} program, so "
                    "the place in its loaders is unknown. Submit this program as a new run"
                )
        with contextlib.ExitStack() as failing:
            failing.push(session)
            for loader in self.progress.loaders:
                loader.open(session)
            failing.pop_all()
        self.session = session
        return session

    def require_unopened(self, what: object) -> None:
        """Raise `SpecError` if `what` is prepared too late to be in the run's checkpoints."""
        if LoopTraining._has_trained:
            raise self._second_training()
        if self.is_open:
            raise SpecError(
                f"{type(what).__name__} is prepared after the run has resumed; expected all calls "
                f"of {self.words.prepare} before the first use of {self.words.owner}.epochs, "
                "resume or session"
            )

    def close(self) -> None:
        """Complete the last step, wait for the last commit and close the session."""
        if self.session is None or self._is_closed:
            return
        if not self.session.has_failed:
            self.complete_step()
        self._is_closed = True
        LoopTraining._has_trained = LoopTraining._has_trained or self._has_looped
        self.session.close()
        self.after_boundary(self.session)

    def leave(self) -> None:
        """End this process after all ranks have agreed to stop. The exit status is 0."""
        self.end()
        raise SystemExit(0)

    # --- the loop -------------------------------------------------------------------------

    def epochs(self, total: int, start: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from `start` on without a checkpoint."""
        session = self.start()
        if self._has_looped:
            raise self._second_training()
        is_fresh = session.resumed_from is None
        self._is_looping = self._has_looped = True
        self.progress.begin_loop()
        try:
            for epoch in session.epochs(total):
                self.after_boundary(session)
                if is_fresh and epoch < start:
                    continue
                yield epoch
                self.complete_step()
                self.progress.next_epoch()
                self._resumed_generators = None
        finally:
            self._is_looping = False
        self.after_boundary(session)
        if session.should_stop:
            self.leave()

    def iterate(self, loader: WrappedLoader, skip: int) -> Iterator[Any]:
        """Return one pass over `loader` after `skip` batches, or from its restored place on.

        A pass that was complete before the resume is left out now, even if no batch is asked for.
        """
        resumed = loader.resumed if self._is_looping else None
        if resumed is None or not resumed.passes:
            return self._run_pass(loader, skip)
        self._begin_steps(has_end=True)
        assert self._resumed_generators is not None
        return self.progress.leave_out(loader, self._resumed_generators)

    def _run_pass(self, loader: WrappedLoader, skip: int) -> Iterator[Any]:
        if not self.progress.is_in_pass:
            # The program left the loop over the batches in the middle of a pass.
            self.complete_step()
        else:
            self.progress.note_new_pass()
        resumed = loader.resumed if self._is_looping else None
        if resumed is not None:
            self._begin_steps()
            loader.resumed = None
        loader.has_begun = True
        is_new = resumed is None or not resumed.done
        loader.enter(is_training=self._is_training, is_new=is_new)
        done = self._place(loader, skip, resumed)
        one = self.progress.begin(loader, done)
        one.is_training = one.is_of_epoch = not is_new
        batches = loader.read()
        try:
            for batch in batches:
                one.done += loader.unit
                yield batch
                if self.progress.ends_step(one):
                    self.progress.forget_new_pass()
                    if loader.is_at_end(one.done):
                        loader.exhaust(batches)
                    self.complete_step()
        finally:
            self.progress.end(one)

    @property
    def _is_training(self) -> bool:
        return self._is_looping and any(model.training for model in self.models())

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped. Raises `SpecError` outside of the training loop."""
        if self._ignores_steps:
            return
        if not self._is_looping:
            raise SpecError(
                f"an optimizer step outside of a loop over {self.words.owner}.epochs(n); expected "
                f"`for epoch in {self.words.owner}.epochs(n)` in place of `range(n)`, so that a "
                "resume finds the epoch"
            )
        for model in self.wrappers():
            if not getattr(model, "require_backward_grad_sync", True):
                require_other_parameters(model, optimizer)
        self.progress.note_step()

    def complete_step(self) -> None:
        """Complete the step whose optimizer has stepped, if any. Ends the process on a stop."""
        if not self.progress.has_stepped:
            return
        assert self.session is not None
        should_leave = self.session.boundary(ends_epoch=self.progress.close_step())
        self.after_boundary(self.session)
        if should_leave:
            self.leave()

    # --- parts ----------------------------------------------------------------------------

    def _begin_steps(self, *, has_end: bool = False) -> None:
        """Restore the random generators before the first step of a resume inside an epoch.

        With `has_end`, the stopped launch had done all steps of a pass, so its end comes first.
        """
        assert self.session is not None
        if self.session.begin_steps(has_end=has_end):
            self.leave()
        if self._resumed_generators is None:
            self._resumed_generators = self.progress.generators()

    def _place(self, loader: WrappedLoader, skip: int, resumed: ResumedEpoch | None) -> int:
        """Let the next pass begin at its place. Return the dealt batches before it."""
        if resumed is not None and resumed.done:
            loader.start_at(loader.start_of(resumed, self._resumed_generators))
            # Another loader that continues finds the generators as this one leaves them.
            self._resumed_generators = None
            return resumed.done
        if skip and loader.can_skip:
            loader.start_at(Start(skip=skip))
        return skip * loader.unit

    def _second_training(self) -> SpecError:
        return SpecError(
            f"a second training in this program: its loop over {self.words.owner}.epochs(n) has "
            "ended or was begun before. A run is one training, and its checkpoints cannot contain "
            "a second one. Give each training its own program and run"
        )


def require_other_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `SpecError` if the optimizer steps with gradients of `model` that are not shared."""
    own = {id(each) for each in model.parameters()}
    if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        raise SpecError(
            f"a step of {type(optimizer).__name__} while the gradients of its model are not "
            "synchronized (no_sync), as in local SGD: each rank then has its own weights, and a "
            "checkpoint has one copy. Take each step with synchronized gradients"
        )


def listed(names: str | Collection[str]) -> Collection[str]:
    return (names,) if isinstance(names, str) else names


def one_model(models: list[nn.Module]) -> nn.Module:
    """Return the model, or one over several, whose tensors then have distinct names."""
    if len(models) == 1:
        return models[0]
    return nn.ModuleDict({f"model_{number}": model for number, model in enumerate(models)})


T = TypeVar("T", bound=LoopTraining)


class LoopMethods(Generic[T]):
    """Stands in front of a framework's class, which sets `_training`."""

    _training: T

    def epochs(self, total: int, start: int = 0) -> Iterator[int]:
        """Iterates over the remaining epochs, counted from 0, up to `total` - 1.

        It begins with `start` if the run has no checkpoint, and else where the run was:
        `epochs(n + 1, 1)` in place of `range(1, n + 1)`. All ranks call it after everything is
        prepared. Raises `SpecError` if nothing is prepared and for a second loop,
        `CheckpointError` if the run's checkpoint does not fit, and `SaveError` if the last
        checkpoint could not be committed.
        """
        return self._training.epochs(total, start)

    def resume(self) -> int:
        """Resumes, and returns the number of batches that each rank was trained on so far.

        Call it after everything is prepared, and only if the program counts its batches over all
        epochs. `epochs` resumes too. Raises as `epochs`.
        """
        self._training.start()
        return self._training.progress.trained

    @property
    def first_batch(self) -> int:
        """The number, from 0, of the first batch that the epoch's training loop gets.

        It is 0 except in the epoch in which the run resumed. Pass it to `enumerate` as the number
        to start with.
        """
        return self._training.progress.first_batch

    def epoch_total(self) -> torch.Tensor:
        """Returns a sum over the batches of this epoch, which a resume continues: one number.

        It is zero at the start of each epoch. Assign it in place of 0, and add to it with `+=`. A
        program with several sums calls it for each of them, in the same order in each epoch. A
        relaunch at another number of ranks begins with zero.
        """
        return self._training.progress.totals.give()

    @property
    def session(self) -> FrameworkSession:
        """The session, which is opened if necessary. Raises as `epochs`."""
        return self._training.start()

    def _record_numbers(self, values: Mapping[str, Any]) -> None:
        """Record the numbers that the program logs, while the session is open."""
        if self._training.is_open:
            self.session.log(**{key: float(v) for key, v in values.items() if _is_number(v)})


def _is_number(value: Any) -> bool:
    is_single = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_single or isinstance(value, int | float)
