"""Accelerate's `Accelerator` with Holdfast's checkpoints, stops and resumes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import accelerate
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import CheckpointError, NotFoundError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.frameworks.accelerate.loaders import is_loader, skip_first_batches, wrapped
from holdfast.trainer.frameworks.program_loop import training
from holdfast.trainer.frameworks.program_loop.progress import LoopProgress
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.streamed import undivided
from holdfast.trainer.loading.checkpoint import find_directory, load_checkpoint
from holdfast.trainer.streams.convert import is_streaming_dataset

# The training of one `Accelerator`: its objects, and its `save_state` and `load_state`.

# What a checkpoint keeps of Accelerate's own state, beside the place in the loaders.


class AccelerateProgress(LoopProgress):
    """It is the object `accelerate` of the session's extras."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.device, prepare="accelerator.prepare")
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulation": int(self._accelerator.step),
            "saves": int(self._accelerator.project_configuration.iteration),
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["accumulation"]
        self._accelerator.project_configuration.iteration = state["saves"]
        super().load_state_dict(state)


# Values of `DistributedType` whose state Holdfast saves here.
SUPPORTED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


class Training(training.LoopTraining):
    """Connects an accelerator's objects to a `Session`.

    The session is opened by the first call that needs it: `epochs`, `resume` or `load_state`. By
    then the program has prepared and registered all its objects.
    """

    words = training.Words(
        framework="an Accelerate", owner="accelerator", prepare="accelerator.prepare"
    )
    shared_name = "accelerate"
    rank_name = "accelerate_fetches"

    def __init__(self, accelerator: Any, options: Mapping[str, Any]) -> None:
        super().__init__(AccelerateProgress(accelerator), options)
        self._accelerator = accelerator
        # Accelerate keeps its list of models without their wrappers.
        self.wrapped: list[nn.Module] = []
        self._folders = Folders(
            accelerator.project_configuration, is_main=bool(accelerator.is_main_process)
        )

    # --- the session ----------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        found: list[nn.Module] = self._accelerator._models
        return found

    def wrappers(self) -> list[nn.Module]:
        return self.wrapped

    def parts(self) -> training.Parts:
        self._check()
        accelerator = self._accelerator
        extra = {f"custom_{n}": each for n, each in enumerate(accelerator._custom_objects)}
        if accelerator.scaler is not None:
            extra["scaler"] = accelerator.scaler
        return training.Parts(
            optimizers=accelerator._optimizers,
            schedulers=accelerator._schedulers,
            extra=extra,
        )

    def end(self) -> None:
        """End the training as the program does: trackers are closed."""
        self._accelerator.end_training()

    def after_boundary(self, session: FrameworkSession) -> None:
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
        """Load `folder`, unless the run already has a checkpoint.

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
            load_checkpoint(
                find_linked(link, folder), training.one_model(self.models()), optimizers
            )
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


class Accelerator(training.LoopMethods[Training], accelerate.Accelerator):
    """An `Accelerator` that resumes automatically and stops on all ranks after the same step.

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
        dataset = getattr(data_loader, "dataset", None)
        if is_streaming_dataset(dataset) and not is_loader(data_loader):
            prepared = undivided(prepare_data_loader, self, data_loader)
            self._dataloaders.append(prepared)
        else:
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if is_loader(prepared):
            return prepared
        owner = self._training
        loader = wrapped(
            data_loader,
            prepared,
            len(owner.progress.loaders),
            owner.iterate,
            ranks=self.num_processes,
            is_split=self.split_batches,
        )
        owner.progress.add(loader)
        self._dataloaders[-1] = loader
        return loader

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
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
        """Starts from a folder of `save_state`, if the run has no checkpoint yet.

        A relaunched run has one and continues it. After the training loop, the models and
        optimizers of the folder are loaded. Raises `CheckpointError` if there is nothing to load,
        and `SpecError` inside of the loop.
        """
        if input_dir is not None:
            folder: Path | None = Path(input_dir).expanduser().absolute()
        elif self.project_configuration.automatic_checkpoint_naming:
            folder = next(reversed(numbered(numbered_folder(self.project_configuration))), None)
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


# The folders that a program names in `save_state`. Each links to a checkpoint of the run.
#
# A link is a file `holdfast.json` with the checkpoint's id and directory. The journal says that the
# folder exists, as for an export, so no keep rule deletes its checkpoint before the folder is gone.

LINK: Final = "holdfast.json"
FORMAT: Final = 1
NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
# Every checkpoint of Accelerate itself has such a file, whatever is trained.
STOCK: Final = "random_states_*.pkl"


@dataclass(frozen=True)
class FolderLink:
    """The content of a folder's link: a checkpoint's id, and where it was when it was written."""

    checkpoint: str
    directory: Path


class Folders:
    """Writes the links of one run, on rank 0, and applies `total_limit`."""

    def __init__(self, configuration: Any, *, is_main: bool) -> None:
        self._configuration, self._is_main = configuration, is_main
        self._wanted: list[Path] = []
        # A folder of numbered ones, and the checkpoint whose commit allows to delete older ones.
        self._to_limit: tuple[Path, Path] | None = None

    def for_save(self, output_dir: str | Path | None, run: str) -> Path:
        """Return the folder of a save. Raises `SpecError` if it belongs to something else."""
        if not self._configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise SpecError(
                    "save_state without output_dir: expected a folder, or a ProjectConfiguration "
                    "with automatic_checkpoint_naming=True"
                )
            return Path(output_dir).expanduser().absolute()
        folder = (
            numbered_folder(self._configuration) / f"checkpoint_{self._configuration.iteration}"
        )
        link = read_link(folder)
        is_ours = link is not None and link.checkpoint.rpartition(":")[0] == run
        if self._is_main and folder.exists() and any(folder.iterdir()) and not is_ours:
            raise SpecError(
                f"{folder} already exists and is not a save of run {run}; use another project_dir, "
                "or set project_configuration.iteration to a number that is free"
            )
        return folder

    def want(self, folder: Path) -> None:
        """Link `folder` to the next checkpoint."""
        if self._is_main:
            durable.make_directory(folder)
        self._wanted.append(folder)

    def look(self, session: FrameworkSession) -> None:
        """Write links to the current step's checkpoint, and delete folders beyond the limit."""
        checkpoint = session.current_checkpoint
        if self._wanted and checkpoint is not None:
            wanted, self._wanted = self._wanted, []
            if self._is_main:
                for folder in wanted:
                    self._link(session, checkpoint, folder)
        if self._to_limit is not None and filesystems.is_there(self._to_limit[1] / MANIFEST):
            delete_oldest(self._to_limit[0], self._configuration.total_limit)
            self._to_limit = None

    def _link(self, session: FrameworkSession, checkpoint: str, folder: Path) -> None:
        name = checkpoint.rpartition(":")[2]
        directory = RunPaths(session.run_directory).checkpoint(name)
        content = {"format": FORMAT, "checkpoint": checkpoint, "directory": str(directory)}
        durable.write_bytes(folder / LINK, durable.to_json(content))
        session.keep_while_there(checkpoint, folder)
        configuration = self._configuration
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            self._to_limit = folder.parent, directory


def numbered_folder(configuration: Any) -> Path:
    return Path(configuration.project_dir).expanduser().absolute() / "checkpoints"


def numbered(parent: Path) -> list[Path]:
    """Return the folders `checkpoint_<n>` in `parent`, by number."""
    names = [name.name for name in parent.iterdir()] if parent.is_dir() else []
    matches = [match for match in map(NUMBERED.fullmatch, names) if match]
    return [parent / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def delete_oldest(parent: Path, limit: int) -> None:
    """Delete the numbered folders with the lowest numbers until `limit` are left, at least one.

    A checkpoint that was linked is then deleted only if the run's keep rules allow it.
    """
    found = numbered(parent)
    for folder in found[: max(0, len(found) - max(limit, 1))]:
        shutil.rmtree(folder, ignore_errors=True)


def read_link(folder: Path) -> FolderLink | None:
    """Return the link in `folder`, or None without one. Raises `CheckpointError` if unreadable."""
    path = folder / LINK
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']!r}; this version of Holdfast reads {FORMAT}"
            )
        return FolderLink(content["checkpoint"], Path(content["directory"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a link to a checkpoint: {error}; load another folder"
        ) from error


def find_linked(link: FolderLink, folder: Path) -> Path:
    """Return the directory of a linked checkpoint. Raises `CheckpointError` if it is not there."""
    try:
        directory = find_directory(link.directory)
    except NotFoundError:
        try:
            directory = find_directory(link.checkpoint)
        except NotFoundError as error:
            raise CheckpointError(f"{folder} links to {link.checkpoint}, but {error}") from error
    if not filesystems.is_there(directory / MANIFEST):
        raise CheckpointError(
            f"{folder} links to {link.checkpoint}, which was never committed: its launch ended "
            "before. Load another folder"
        )
    return directory


def require_stock(folder: Path | None) -> Path:
    """Return `folder` if it is a checkpoint of Accelerate. Raises `CheckpointError` otherwise."""
    if folder is None or not folder.is_dir():
        raise CheckpointError(
            f"load_state: {folder or 'the project'} has no checkpoint; expected a folder that "
            "save_state wrote"
        )
    if not any(folder.glob(STOCK)):
        raise CheckpointError(
            f"{folder}: neither a save of Holdfast ({LINK}) nor one of Accelerate ({STOCK}); "
            "expected a folder that save_state wrote. A checkpoint of another framework cannot be "
            "continued here"
        )
    return folder


def report_ignored(folder: Path | None, session: FrameworkSession, *, is_main: bool) -> None:
    """Report that a run that already has a checkpoint does not load `folder`."""
    if is_main:
        report(
            f"holdfast: load_state({str(folder) if folder else ''!r}) is left out: the run "
            f"continues from its own checkpoint {session.resumed_from}, after step {session.step}"
        )
