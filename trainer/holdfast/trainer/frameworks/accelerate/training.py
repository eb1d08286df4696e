"""The training of one `Accelerator`: its objects, and its `save_state` and `load_state`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from accelerate.utils import DistributedType
from torch import nn

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.accelerate.folders import (
    Folders,
    find_linked,
    read_link,
    report_ignored,
    require_stock,
)
from holdfast.trainer.frameworks.program_loop.progress import Progress
from holdfast.trainer.frameworks.program_loop.training import (
    LoopTraining,
    Parts,
    Words,
    one_model,
)
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.loading.checkpoint import load_checkpoint

# What a checkpoint keeps of Accelerate's own state, beside the place in the loaders.


class AccelerateProgress(Progress):
    """It is the object `accelerate` of the session's extras."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.device, prepare="accelerator.prepare")
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        return {
            "accumulation": int(self._accelerator.step),
            "saves": int(self._accelerator.project_configuration.iteration),
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters, and the places of the loaders."""
        self._accelerator.step = state["accumulation"]
        self._accelerator.project_configuration.iteration = state["saves"]
        super().load_state_dict(state)


# Values of `DistributedType` whose state Holdfast saves here.
SUPPORTED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


class Training(LoopTraining):
    """Connects an accelerator's objects to a `Session`.

    The session is opened by the first call that needs it: `epochs`, `resume` or `load_state`. By
    then the program has prepared and registered all its objects.
    """

    words = Words(framework="an Accelerate", owner="accelerator", prepare="accelerator.prepare")
    shared_name = "accelerate"
    rank_name = "accelerate_fetches"

    def __init__(self, accelerator: Any, options: Mapping[str, Any]) -> None:
        """`options` are further arguments of the `Session`."""
        super().__init__(AccelerateProgress(accelerator), options)
        self._accelerator = accelerator
        # Accelerate keeps its list of models without their wrappers.
        self.wrapped: list[nn.Module] = []
        self._folders = Folders(
            accelerator.project_configuration, is_main=bool(accelerator.is_main_process)
        )

    # --- the session ----------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """Return the prepared models."""
        found: list[nn.Module] = self._accelerator._models
        return found

    def wrappers(self) -> list[nn.Module]:
        """Return what `prepare` returned for the models."""
        return self.wrapped

    def parts(self) -> Parts:
        """Return what was prepared and registered. Raises `SpecError` if it cannot be saved."""
        self._check()
        accelerator = self._accelerator
        extra = {f"custom_{n}": each for n, each in enumerate(accelerator._custom_objects)}
        if accelerator.scaler is not None:
            extra["scaler"] = accelerator.scaler
        return Parts(
            optimizers=accelerator._optimizers,
            schedulers=accelerator._schedulers,
            extra=extra,
        )

    def end(self) -> None:
        """End the training as the program does: trackers are closed."""
        self._accelerator.end_training()

    def after_boundary(self, session: FrameworkSession) -> None:
        """Write the links of `save_state`."""
        self._folders.look(session)

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
            optimizers = self._accelerator._optimizers
            load_checkpoint(find_linked(link, folder), one_model(self.models()), optimizers)
        else:
            # Nothing has been trained, so a session that starts from the checkpoint replaces it.
            self.start().abandon()
            self.session = None
            self.start(find_linked(link, folder))

    # --- parts ----------------------------------------------------------------------------

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
