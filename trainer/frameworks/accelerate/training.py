"""The training of one `Accelerator`: its session, its epochs and the end of each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from accelerate.utils import DistributedType
from torch import nn

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.frameworks.accelerate.batches import Start
from holdfast.trainer.frameworks.accelerate.folders import (
    Folders,
    find_linked,
    read_link,
    report_ignored,
    require_stock,
)
from holdfast.trainer.frameworks.accelerate.loaders import Loader, Resumed
from holdfast.trainer.frameworks.accelerate.progress import Fetches, Progress
from holdfast.trainer.loading.checkpoint import load_checkpoint
from holdfast.trainer.session import Session

PROGRESS: Final = "accelerate"
FETCHES: Final = "accelerate_fetches"
# Values of `DistributedType` whose state Holdfast saves here.
SUPPORTED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


class Training:
    """Connects an accelerator's objects to a `Session`.

    The session is opened by the first call that needs it: `epochs`, `resume` or `load_state`. By
    then the program has prepared and registered all its objects.
    """

    def __init__(self, accelerator: Any, options: Mapping[str, Any]) -> None:
        """`options` are further arguments of the `Session`."""
        self._accelerator, self._options = accelerator, dict(options)
        self.progress = Progress(accelerator)
        self.session: Session | None = None
        self._folders = Folders(
            accelerator.project_configuration, is_main=bool(accelerator.is_main_process)
        )
        self._is_looping = self._has_looped = self._ignores_steps = self._is_closed = False

    @property
    def is_open(self) -> bool:
        """True while there is an open session."""
        return self.session is not None and not self._is_closed

    @property
    def saves(self) -> bool:
        """True from the start of the loop until the session is closed: it saves for the program."""
        return self.is_open and self._has_looped

    # --- start and end --------------------------------------------------------------------

    def start(self, start_from: Path | None = None) -> Session:
        """Open the session, which resumes. Later calls return it.

        Raises `SpecError` if the program's objects cannot be saved here, `CheckpointError` for a
        checkpoint of another framework, and as `Session` does.
        """
        if self.session is not None:
            return self.session
        self._check()
        accelerator, options = self._accelerator, dict(self._options)
        extra = {PROGRESS: self.progress, **options.pop("extra", {})}
        extra |= {f"custom_{n}": each for n, each in enumerate(accelerator._custom_objects)}
        if accelerator.scaler is not None:
            extra["scaler"] = accelerator.scaler
        session = Session(
            _one_model(accelerator._models),
            accelerator._optimizers,
            accelerator._schedulers,
            extra=extra,
            per_rank={FETCHES: Fetches(self.progress), **options.pop("per_rank", {})},
            start_from=start_from,
            **options,
        )
        is_excluded = f"extra.{PROGRESS}" in listed(options.get("exclude", ()))
        if session.resumed_from is not None and not (self.progress.was_restored or is_excluded):
            with session:
                raise CheckpointError(
                    f"{session.resumed_from} was not saved by an Accelerate program, so the place "
                    "in its loaders is unknown. Submit this program as a new run"
                )
        self.session = session
        return session

    def close(self) -> None:
        """Complete the last step, wait for the last commit and close the session."""
        if self.session is None or self._is_closed:
            return
        self.complete_step()
        self._is_closed = True
        self.session.close()
        self._folders.look(self.session)

    def leave(self) -> None:
        """End this process after all ranks have agreed to stop. The exit status is 0."""
        self._accelerator.end_training()
        raise SystemExit(0)

    # --- the loop -------------------------------------------------------------------------

    def epochs(self, total: int, start: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from `start` on without a checkpoint."""
        session = self.start()
        is_fresh = session.resumed_from is None
        self._is_looping = self._has_looped = True
        try:
            for epoch in session.epochs(total):
                self._folders.look(session)
                if is_fresh and epoch < start:
                    continue
                yield epoch
                self.complete_step()
                self.progress.next_epoch()
        finally:
            self._is_looping = False
        self._folders.look(session)
        if session.should_stop:
            self.leave()

    def iterate(self, loader: Loader, skip: int) -> Iterator[Any]:
        """Run one pass over `loader` after `skip` batches, or from its restored place on."""
        if not self.progress.is_in_pass:
            # The program left the loop over the batches in the middle of a pass.
            self.complete_step()
        resumed = loader.resumed if self._is_looping else None
        if resumed is not None:
            assert self.session is not None
            if self.session.begin_steps():
                self.leave()
            if resumed.passes:
                resumed.passes -= 1
                return
            loader.resumed = None
        loader.has_begun = True
        done = self._place(loader, skip, resumed)
        one = self.progress.begin(loader, done)
        try:
            for batch in loader.inner:
                one.done += loader.unit
                yield batch
                if self.progress.ends_step(one):
                    self.complete_step()
        finally:
            self.progress.end(one)

    def note_step(self) -> None:
        """Note that an optimizer has stepped. Raises `SpecError` outside of the training loop."""
        if self._ignores_steps:
            return
        if not self._is_looping:
            raise SpecError(
                "an optimizer step outside of a loop over accelerator.epochs(n); expected `for "
                "epoch in accelerator.epochs(n)` in place of `range(n)`, so that a resume finds "
                "the epoch"
            )
        self.progress.note_step()

    def complete_step(self) -> None:
        """Complete the step whose optimizer has stepped, if any. Ends the process on a stop."""
        if not self.progress.has_stepped:
            return
        assert self.session is not None
        should_leave = self.session.boundary(ends_epoch=self.progress.close_step())
        self._folders.look(self.session)
        if should_leave:
            self.leave()

    # --- save_state and load_state --------------------------------------------------------

    def folder_for(self, output_dir: str | Path | None) -> Path:
        """Return the folder that a save in the open session gets."""
        assert self.session is not None
        return self._folders.for_save(output_dir, self.session.run_directory.name)

    def save(self, folder: Path) -> None:
        """Request a checkpoint at the end of this step or epoch, with a link in `folder`."""
        assert self.session is not None
        self._folders.want(folder)
        if self._is_looping:
            self.session.checkpoint(wait=True)
        else:
            self._folders.look(self.session)

    def load(self, folder: Path | None, load_stock: Callable[[Path], None]) -> None:
        """Load `folder`, unless the run has a checkpoint of its own.

        `load_stock` loads a checkpoint of Accelerate itself. Raises `CheckpointError` if there is
        nothing to load, and `SpecError` inside of the training loop.
        """
        link = None if folder is None else read_link(folder)
        if self._is_looping:
            raise SpecError(
                f"load_state({str(folder)!r}) inside of the loop over accelerator.epochs; expected "
                "it before the loop, or after it"
            )
        if self.start().resumed_from is not None and not self._has_looped:
            report_ignored(folder, self.start(), is_main=self._accelerator.is_main_process)
        elif link is None or folder is None:
            self._load_stock(require_stock(folder), load_stock)
        elif self._has_looped:
            models, optimizers = self._accelerator._models, self._accelerator._optimizers
            load_checkpoint(find_linked(link, folder), _one_model(models), optimizers)
        else:
            # Nothing has been trained, so a session that starts from the checkpoint replaces it.
            self.start().abandon()
            self.session = None
            self.start(find_linked(link, folder))

    # --- parts ----------------------------------------------------------------------------

    def _place(self, loader: Loader, skip: int, resumed: Resumed | None) -> int:
        """Let the next pass begin at its place. Return the dealt batches before it."""
        if resumed is not None and resumed.done:
            loader.start_at(loader.start_of(resumed))
            return resumed.done
        if skip and loader.batches is not None:
            loader.start_at(Start(skip=skip))
        return skip * loader.unit

    def _load_stock(self, folder: Path, load_stock: Callable[[Path], None]) -> None:
        # To load an empty optimizer's state, torch lets it step once without gradients.
        with contextlib.ExitStack() as after:
            after.callback(setattr, self, "_ignores_steps", self._ignores_steps)
            self._ignores_steps = True
            load_stock(folder)
        if not self._has_looped:
            for loader in self.progress.loaders:
                loader.take_over()

    def _check(self) -> None:
        accelerator = self._accelerator
        kind = accelerator.distributed_type
        if kind not in {getattr(DistributedType, name) for name in SUPPORTED}:
            raise SpecError(
                f"distributed_type {kind}: expected one of {', '.join(SUPPORTED)}. For DeepSpeed, "
                "see Holdfast's page on it"
            )
        if not accelerator._models or not accelerator._optimizers:
            raise SpecError(
                f"{len(accelerator._models)} models and {len(accelerator._optimizers)} optimizers "
                "are prepared; expected accelerator.prepare(model, optimizer, …) before the loop "
                "over accelerator.epochs"
            )


def listed(names: str | Collection[str]) -> Collection[str]:
    """Return one name or several as a collection."""
    return (names,) if isinstance(names, str) else names


def _one_model(models: list[nn.Module]) -> nn.Module:
    """Return the model, or one over several, whose tensors then have distinct names."""
    if len(models) == 1:
        return models[0]
    return nn.ModuleDict({f"model_{number}": model for number, model in enumerate(models)})
