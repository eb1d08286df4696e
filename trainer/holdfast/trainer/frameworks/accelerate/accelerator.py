"""Accelerate's `Accelerator` with Holdfast's checkpoints, stops and resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
from torch.optim import Optimizer

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.accelerate.folders import newest_folder
from holdfast.trainer.frameworks.accelerate.loaders import (
    Loader,
    is_loader,
    skip_first_batches,
)
from holdfast.trainer.frameworks.accelerate.training import Training
from holdfast.trainer.frameworks.program_loop.methods import LoopMethods


class Accelerator(LoopMethods[Training], accelerate.Accelerator):
    """An `Accelerator` that resumes by itself and stops on all ranks after the same step.

    Loop over `accelerator.epochs(n)` in place of `range(n)`. A step is complete when the program
    asks the loader for the batch after the optimizer's step. Then Holdfast saves if a save is due.
    When the ranks have agreed to stop, the process ends there with status 0.
    """

    def __init__(self, *args: Any, session: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes the arguments of Accelerate's, and in `session` further ones of `Session`.

        `session={"interval": "10m"}` is an example. Models, optimizers, schedulers and registered
        objects are passed to the session by `prepare` and `register_for_checkpointing`.
        """
        super().__init__(*args, **kwargs)
        self._training = Training(self, session or {})

    # --- the loop -------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns the loader without its first batches.

        In the epoch in which Holdfast resumed, the loader continues at the restored place instead.
        """
        return skip_first_batches(dataloader, num_batches)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Logs to the trackers as Accelerate does, and numbers to the run's metrics too."""
        super().log(values, step=step, log_kwargs=log_kwargs or {})
        self._record_numbers(values)

    def end_training(self) -> None:
        """Waits for the last commit, closes the session, then does as Accelerate does."""
        self._training.close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Closes the session, then does as Accelerate does."""
        self._training.close()
        return super().free_memory(*objects)

    # --- preparation ----------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader as Accelerate does, so that its place can be restored."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if is_loader(prepared):
            return prepared
        loader = Loader(prepared, len(self._training.progress.loaders), self._training.iterate)
        self._training.progress.add(loader)
        self._dataloaders[-1] = loader
        return loader

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a model as Accelerate does."""
        prepared = super().prepare_model(model, *args, **kwargs)
        self._training.wrapped.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares an optimizer as Accelerate does, so that its steps are seen.

        Raises `SpecError` after the session was opened, which would not save this optimizer.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, *args, **kwargs)
        self._training.require_unopened(optimizer)
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        inner = prepared.optimizer
        if not isinstance(inner, Optimizer):
            raise SpecError(f"{type(inner).__name__}: expected a torch.optim.Optimizer")
        inner.register_step_post_hook(lambda stepped, *_: self._training.note_step(stepped))
        return prepared

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Registers a hook as Accelerate does. Raises `SpecError` if it is registered already."""
        _refuse_twice(hook, self._save_model_state_pre_hook)
        return super().register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Any) -> Any:
        """Registers a hook as Accelerate does. Raises `SpecError` if it is registered already."""
        _refuse_twice(hook, self._load_model_state_pre_hook)
        return super().register_load_state_pre_hook(hook)

    # --- checkpoints that the program asks for --------------------------------------------

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Saves a checkpoint of the run at the end of this step or epoch; returns the folder.

        The folder gets a link to the checkpoint, which `load_state` follows. The call does not
        wait for the commit. Before the loop, this is Accelerate's own `save_state`.
        Raises `SpecError` for a folder that something else has written.
        """
        if not self._training.saves:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        folder = self._training.folder_for(output_dir)
        self._training.save(folder)
        if self._save_model_state_pre_hook:
            folder.mkdir(parents=True, exist_ok=True)
            weights = [self.get_state_dict(model, unwrap=False) for model in self._models]
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(folder))
        self.project_configuration.iteration += 1
        return folder

    def load_state(
        self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Starts from a folder of `save_state`, if the run has no checkpoint of its own.

        A relaunched run has one and continues it. After the training loop, the models and
        optimizers of the folder are loaded. Raises `CheckpointError` if there is nothing to load,
        and `SpecError` inside of the loop.
        """
        if input_dir is not None:
            folder: Path | None = Path(input_dir).expanduser().absolute()
        elif self.project_configuration.automatic_checkpoint_naming:
            folder = newest_folder(self.project_configuration)
        else:
            raise SpecError(
                "load_state without input_dir: expected a folder, or a ProjectConfiguration with "
                "automatic_checkpoint_naming=True"
            )
        self._training.load(
            folder, lambda found: super(Accelerator, self).load_state(found, load_kwargs, **kwargs)
        )


def _refuse_twice(hook: Any, hooks: Mapping[int, Any]) -> None:
    if hook in hooks.values():
        raise SpecError(
            f"the hook {getattr(hook, '__name__', hook)} is registered twice; register it once"
        )
