"""One training of a trainer as a run: its session, its place in the epochs, its directories."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from transformers import TrainerCallback, modeling_utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from holdfast.contracts import environment as names
from holdfast.contracts.disk import durable, paths
from holdfast.contracts.errors import CheckpointError, PreflightError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.plain_text import counted
from holdfast.trainer.data.order import local_batch, micro_parts
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.transformers.checks import check_arguments
from holdfast.trainer.frameworks.transformers.fetching import FetchStates, keep_remainder, watched
from holdfast.trainer.frameworks.transformers.progress import (
    NOTHING,
    EpochPlace,
    RankShare,
    Todo,
    TrainerProgress,
    changing_modules,
    check_names,
)
from holdfast.trainer.frameworks.transformers.streams import StreamEpochs, stream_of, without_skips
from holdfast.trainer.process.program import program_stem
from holdfast.trainer.ranks.collective import attempt
from holdfast.trainer.ranks.rank_context import choose_directory
from holdfast.trainer.sources.safetensors_file import LENGTH_BYTES, METADATA, TYPES
from holdfast.trainer.staging.file_writers import SlotFile, Writer
from holdfast.trainer.state import rng
from holdfast.trainer.streams.loader import EpochStream

# The model's files in `checkpoint-N`, written in the background.
#
# The trainer calls safetensors to write them, with the names of `WRITERS`. While it saves, calls
# with these names for files of its directory copy the tensors into memory, and the flusher writes
# the files. Programs may read a directory as soon as it is saved. So the trainer itself writes
# the files if it has a callback with `on_save`, uploads them, or has a class with a save of its
# own.

# Where Transformers calls safetensors, for its own models and for other modules.
WRITERS: Final = ((modeling_utils, "safe_save_file"), (safetensors.torch, "save_file"))
SAVES: Final = ("_save_checkpoint", "save_model", "_save")
NAMES: Final = {dtype: name for name, dtype in TYPES.items()}


def may_wait(trainer: Any) -> bool:
    """Return True if nothing reads the files of a save before the training continues."""
    kinds = [kind for kind in type(trainer).__mro__ if not _is_known(kind)]
    has_own_save = any(name in vars(kind) for kind in kinds for name in SAVES)
    has_reader = any(
        type(callback).on_save is not TrainerCallback.on_save
        for callback in trainer.callback_handler.callbacks
    )
    return not (trainer.args.push_to_hub or has_own_save or has_reader)


@contextlib.contextmanager
def in_background(session: FrameworkSession, directory: Path) -> Iterator[None]:
    """Let the flusher write each safetensors file of `directory` that is saved in the block."""
    functions = [getattr(module, name) for module, name in WRITERS]
    for (module, name), function in zip(WRITERS, functions, strict=True):
        setattr(module, name, partial(_save, session, directory.absolute(), function))
    try:
        yield
    finally:
        for (module, name), function in zip(WRITERS, functions, strict=True):
            setattr(module, name, function)


def safetensors_writer(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Writer:
    """Return the writer of a safetensors file with these dense tensors.

    The library writes to a path, or first makes the whole file in memory, which takes many times as
    long as a copy. The order is the library's: larger types first, so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        facts = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**facts, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)

    def write(output: SlotFile) -> None:
        output.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for _, tensor in ordered:
            output.write(_content(tensor))

    return write


def _save(
    session: FrameworkSession,
    directory: Path,
    save: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Do what `save`, a function of safetensors, does. It is called for all other files."""
    path = Path(filename).absolute()
    if path.parent == directory and _is_plain(tensors):
        session.write_file(path, safetensors_writer(tensors, metadata or {}))
    else:
        save(tensors, filename, metadata=metadata)


def _content(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _is_plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return False for tensors that the library refuses, or that need more than a copy."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.nbytes}
    filled = sum(tensor.nbytes > 0 for tensor in tensors.values())
    return len(storages) == filled and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in NAMES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        for tensor in tensors.values()
    )


def _is_known(kind: type) -> bool:
    return kind is transformers.Trainer or kind.__module__.startswith(__package__)


# The trainer's own directories `checkpoint-N`, which Holdfast's trainer writes without state.
#
# A program may pass the newest one to `train`, as published examples do. If a launch wrote one
# and ended before the checkpoint of its step was committed, this directory has no state to begin
# with. So each has a mark that names its run, and a relaunch of the run then begins as its first
# launch.

TRAINER_STATE: Final = "trainer_state.json"
# A directory with a training state has these. One that Holdfast's trainer wrote has only the first.
WHOLE: Final = (TRAINER_STATE, "scheduler.pt")
MARK: Final = "holdfast.json"


def begin_with(given: str | bool | None, output_dir: str, run: Path) -> str | None:
    """Return the directory to begin with, "" if there must be one and is none, or None.

    `given` is `resume_from_checkpoint`. What the run with folder `run` wrote counts as none.
    """
    if not given:
        return None
    there = sort_checkpoints(output_dir)
    whole = [path for path in there if not missing_files(path)]
    newest = whole[-1] if whole else None
    if given is not True:
        path = os.fspath(given)
        return newest if is_marked(path, run) else path
    has_own = any(is_marked(path, run) for path in there)
    return newest if newest or has_own else ""


def missing_files(path: str) -> list[str]:
    """Return the files of a training state that `path` lacks."""
    return [name for name in WHOLE if not (Path(path) / name).exists()]


def mark(path: Path, run: Path) -> None:
    """Note in the directory, which need not exist, that the run with folder `run` writes it."""
    durable.make_directory(path)
    durable.write_bytes(path / MARK, _mark_of(run))


def is_marked(path: str, run: Path) -> bool:
    """Return whether the run with folder `run` wrote the directory. A damaged mark says no."""
    found = Path(path) / MARK
    return found.exists() and found.read_bytes() == _mark_of(run)


def _mark_of(run: Path) -> bytes:
    return durable.to_json({"run": str(run)})


def step_of(path: str | None) -> int:
    """Return the step of a directory of Transformers, or 0 without one."""
    state = Path(path or "") / TRAINER_STATE
    if not path or not state.exists():
        return 0
    return int(json.loads(state.read_bytes())["global_step"])


# The global batch of a run: the same at every number of ranks.
#
# A trainer's arguments give the batch per device. The first launch of a run notes how many ranks
# shared it, in `transformers.json` in the run's folder. A later launch on other ranks changes the
# batch per device and the gradient accumulation so that the global batch stays the same.

FILE: Final = "transformers.json"


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """The arguments of a program, and the number of ranks that first ran with them."""

    per_device: int
    accumulation: int
    world_size: int

    @property
    def total(self) -> int:
        """The global batch: the samples of one optimizer step on all ranks."""
        return self.per_device * self.accumulation * self.world_size

    def shared_by(self, world_size: int) -> GivenBatch:
        """Return the batch per device and the accumulation of as many ranks.

        The batch per device never grows, because it may not fit into the device's memory. Raises
        `SpecError` if the ranks cannot share the global batch evenly.
        """
        share = local_batch(self.total, world_size)
        parts = micro_parts(share, self.per_device)
        if world_size == self.world_size:
            return self
        return GivenBatch(per_device=share // parts, accumulation=parts, world_size=world_size)


def run_folder(directory: str | Path | None, env: Mapping[str, str]) -> Path:
    """Return the run's folder, as the session will choose it."""
    if env.get(names.RANK_STATUS) and env.get(names.RUN_DIRECTORY):
        return Path(env[names.RUN_DIRECTORY])
    return choose_directory(directory, env, program_stem())


def agree_on_batch(given: GivenBatch, folder: Path) -> GivenBatch:
    """Return the batch of this launch. All ranks call this together.

    Other arguments than the first launch had are the program's own wish and count from now on.
    Raises `SpecError` if the ranks cannot share the global batch evenly, and `PreflightError` if
    rank 0 cannot read or write the record.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    shared: list[Any] = [None]
    if is_first:
        found, error = attempt(lambda: _recorded(given, folder))
        shared = [(found, str(error or ""))]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    recorded, problem = shared[0]
    if problem:
        raise PreflightError(f"{folder / FILE}: {problem}. Make the folder writable, or delete it")
    first = GivenBatch(**recorded)
    batch = first.shared_by(given.world_size)
    if batch != given and is_first:
        report(
            f"holdfast: the run began on {counted(first.world_size, 'rank')} with a global "
            f"batch of "
            f"{first.total}; on {counted(given.world_size, 'rank')} this is "
            f"per_device_train_batch_size="
            f"{batch.per_device} and gradient_accumulation_steps={batch.accumulation}"
        )
    return batch


def _recorded(given: GivenBatch, folder: Path) -> Any:
    """Return the run's record, written now if there is none or if the arguments changed."""
    path = folder / FILE
    if path.exists():
        found = json.loads(path.read_bytes())
        if (found["per_device"], found["accumulation"]) == (given.per_device, given.accumulation):
            return found
        report(
            f"holdfast: the batch is now {given.per_device} per device times {given.accumulation}, "
            f"and was {found['per_device']} times {found['accumulation']}; samples may repeat or "
            "be skipped"
        )
    durable.make_directory(folder)
    durable.write_bytes(path, durable.to_json(asdict(given)))
    return asdict(given)


# In place of a path, when the session has restored the state.
RESUMED: Final = "holdfast"
SHARE: Final = "trainer_rank"
DONE: Final = 0


class TrainerRun:
    """Connects a trainer to a session. The trainer's overrides call its methods.

    `session` is None before and after the training. `loader` and `prepared` hold what the trainer
    makes on the way: its prepared loader, and the model and loader that its loop uses.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.session: FrameworkSession | None = None
        self.loader: Any = None
        self.prepared: Any = None
        # The source and the arguments of a stream, and the stream that the session made of them.
        self._given: tuple[Any, dict[str, Any]] | None = None
        self._stream: EpochStream | None = None
        self.fetches = FetchStates()
        self.progress = TrainerProgress(trainer)
        self._share = RankShare(self.progress, self.fetches)
        self._has_trained = False
        # The checkpoint of Transformers to begin with, and what to pass on as resumed from.
        self._path: str | None = None
        self.resumed: str | None = None
        self._states: dict[str, Any] | None = None
        self._steps_per_epoch = 0
        self._watched: tuple[Any, Any] = (None, None)
        self._loss: Any = None
        # The step whose commit allows older directories to be deleted, and the best one then.
        self._rotation: tuple[int, str | None] | None = None

    # --- before the loop ------------------------------------------------------------------

    def start(self, resume_from_checkpoint: str | bool | None, trial: Any) -> None:
        """Check the arguments and set the batch of this launch. Raises `SpecError`."""
        trainer, args = self._trainer, self._trainer.args
        check_arguments(trainer)
        check_names(trainer)
        if trial is not None:
            raise SpecError("train(trial=…): a run is one training; submit a run for each trial")
        if self._has_trained:
            raise SpecError(
                "train() was called twice in one program; a run is one training. Put the second "
                "training into a separate program, and submit it as another run"
            )
        self._has_trained = True
        folder = run_folder(trainer.session_options.get("directory"), os.environ)
        self._path = begin_with(resume_from_checkpoint, args.output_dir, folder)
        if args.accelerator_config.split_batches:
            return
        given = GivenBatch(
            per_device=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            world_size=args.world_size,
        )
        batch = agree_on_batch(given, folder)
        args.per_device_train_batch_size = batch.per_device
        args.gradient_accumulation_steps = batch.accumulation
        trainer._train_batch_size = args.train_batch_size

    def take_loader(self, loader: Any) -> None:
        """Note the loader that the trainer has prepared. Raises `SpecError` for some streams."""
        self.loader, self._given = loader, stream_of(loader, self._trainer.args)

    def open(self, max_steps: int, steps_per_epoch: int) -> None:
        """Make the session, which resumes, and begin its loop. All ranks leave if it must end."""
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        extra = {"trainer": self.progress, **changing_modules(trainer)}
        extra |= {} if scaler is None else {"scaler": scaler}
        options = {"seed": trainer.args.seed, **trainer.session_options}
        self.session = session = FrameworkSession(
            trainer.model_wrapped,
            trainer.optimizer,
            trainer.lr_scheduler,
            extra=extra,
            per_rank={SHARE: self._share},
            # At another number of ranks the sums since the last log begin again.
            exclude=[f"extra.{SHARE}"],
            begins_at=step_of(self._path),
            **options,
        )
        if session.resumed_from is not None:
            if self.progress.loaded is None:
                raise CheckpointError(
                    f"{session.resumed_from} has no state of a Transformers Trainer; another "
                    "framework or a plain loop saved it. Continue it with that program, or load "
                    "only its weights with holdfast.trainer.load_checkpoint"
                )
            self.progress.apply()
            self._forget_missing_best()
            self._path, self.resumed = None, RESUMED
        self._make_stream(session)
        self._steps_per_epoch = steps_per_epoch
        place = self.progress.place
        is_at_end = place.steps >= steps_per_epoch and not place.is_ended
        has_end = is_at_end or any(self.progress.todo) or self.progress.is_over
        must_leave = session.begin(max_steps, has_end=has_end)
        if self.resumed is not None:
            self._states = rng.capture()
        if must_leave and not self.progress.is_over:
            self._leave()

    def _make_stream(self, session: FrameworkSession) -> None:
        """Let the session's loader take the place of the trainer's, if the data is a stream."""
        if self._given is None:
            return
        source, options = self._given
        self._stream = session.stream_of_loader(source, **options)
        accumulation = self._trainer.args.gradient_accumulation_steps
        self.prepared = self.prepared[0], StreamEpochs(self._stream, accumulation)

    @property
    def foreign(self) -> str | None:
        """The directory of Transformers that the trainer must load, or None.

        Raises `ValueError`, as the trainer does, if there is none, and `SpecError` for a
        checkpoint of Holdfast.
        """
        path = self._path
        if path is None:
            return None
        if not path:
            where = self._trainer.args.output_dir
            raise ValueError(f"No valid checkpoint found in output directory ({where})")
        if (Path(path) / paths.MANIFEST).exists():
            raise SpecError(
                f"resume_from_checkpoint={path}: this is a checkpoint of Holdfast, which a run "
                "resumes by itself. Leave the argument out; to begin another run with this "
                "checkpoint, use `holdfast fork`"
            )
        if missing := missing_files(path):
            raise SpecError(
                f"resume_from_checkpoint={path}: there is no {' and no '.join(missing)} in it; "
                "expected a checkpoint that a Transformers Trainer saved with its training state. "
                "To begin with a model only, load it with from_pretrained"
            )
        return path

    def begin_at(self, path: str, epoch: int, steps: int) -> None:
        """Note that the trainer has loaded `path`, one of its directories."""
        self.resumed, self.progress.place = path, EpochPlace(epoch, steps)
        self.progress.first_step = self._trainer.state.global_step

    def place(self, epochs: int) -> tuple[int, int]:
        """Return the epoch to begin with, and its batches that are already trained on."""
        place, args = self.progress.resumed_place(self._steps_per_epoch), self._trainer.args
        ended = self.progress.place
        if self.progress.is_over and ended.is_ended:
            return epochs, 0
        if self._stream is not None and ended.is_ended and self._stream.epoch > ended.epoch:
            # The number of steps of a stream's epoch is not known before.
            return ended.epoch + 1, 0
        is_within = place.steps < self._steps_per_epoch
        steps = 0 if args.ignore_data_skip and is_within else place.steps
        return place.epoch, steps * args.gradient_accumulation_steps

    # --- the loop -------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Put back the sums that the trainer has just reset."""
        if self.resumed == RESUMED:
            self.progress.restore_window()
            self._share.restore_window(self._trainer._globalstep_last_logged)

    def restore_generators(self) -> None:
        """Set the random generators to their restored states, in the first epoch after a resume."""
        if self._states is not None:
            rng.restore(self._states)

    def begin_epoch(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the trainer's epoch that differ from those `given`."""
        loader = given["train_dataloader"]
        if self._watched[0] is not loader:
            self._watched = loader, watched(loader, self.fetches)
            self.fetches.generators.watch(loader)
            self.fetches.data.watch(loader)
        changed = {"train_dataloader": self._watched[1]}
        self.fetches.begin_epoch()
        if self.resumed is None:
            self.progress.place = EpochPlace(given["epoch"])
            return changed
        skipped = given["steps_trained_in_current_epoch"]
        steps = skipped // self._trainer.args.gradient_accumulation_steps
        self.progress.place = EpochPlace(given["epoch"], steps)
        if self.resumed == RESUMED:
            self._share.resume_fetches(given["epoch"], skipped)
        self.restore_generators()
        return {**changed, "resume_from_checkpoint": self.resumed}

    def at_its_place(self) -> contextlib.AbstractContextManager[None]:
        """Around an epoch of the trainer: a stream is at its place, so nothing is skipped."""
        return contextlib.nullcontext() if self._stream is None else without_skips()

    def take_todo(self) -> Todo:
        """Return the work of the restored step that is still to do."""
        return self.progress.todo if self.resumed == RESUMED else NOTHING

    def continue_epoch(self) -> dict[str, Any]:
        """Return more arguments of the epoch, when the restored step is complete.

        An epoch that has ended, or in which training has ended, trains no more steps.
        """
        progress, control = self.progress, self._trainer.control
        if self._states is not None:
            self._states = rng.capture()
            self.fetches.continue_with(self._states)
        if progress.is_over or control.should_training_stop:
            control.should_training_stop = True
            return {"num_update_steps_per_epoch": progress.place.steps}
        if progress.loaded is not None and progress.loaded["stops"][1] and progress.place.steps:
            return {"num_update_steps_per_epoch": progress.place.steps}
        return {}

    def fetch_first(self, fetch: Callable[[], Any]) -> Any:
        """Return the batches of an epoch's first step, which `fetch` takes from the loader."""
        self.fetches.before_first()
        batches = fetch()
        keep_remainder(self._watched[0], self._trainer.accelerator.gradient_state)
        return batches

    def end_epoch(self) -> None:
        """Forget the resume: it concerned this epoch only."""
        self.resumed = self._states = None

    def complete_step(self, todo: Todo) -> None:
        """End a step of the session. All ranks leave the program here if they agreed to stop.

        Training that has just ended continues to its last evaluation.
        """
        session, progress, control = self.session, self.progress, self._trainer.control
        assert session is not None
        progress.place.steps += 1
        progress.todo = todo
        if self._rotation is not None:
            self._rotate()
        has_end = todo is not NOTHING or self.is_at_end_of_epoch or control.should_training_stop
        if session.boundary(has_end=has_end) and not control.should_training_stop:
            self._leave()

    def complete_todo(self) -> None:
        """Note that the step's evaluation and save are complete."""
        self.progress.todo = NOTHING
        if not self.is_at_end_of_epoch and not self._is_stopping:
            self._open.finish_end()

    def complete_epoch(self) -> None:
        self.progress.place.is_ended = True
        if not self._is_stopping:
            self._open.finish_end()

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True after the last step of the epoch, and after a callback has ended the epoch."""
        is_cut = self._trainer.control.should_epoch_stop
        return self.progress.place.steps >= self._steps_per_epoch or is_cut

    @property
    def _is_stopping(self) -> bool:
        return bool(self._trainer.control.should_training_stop)

    # --- the end --------------------------------------------------------------------------

    def finish(self) -> None:
        """Commit the last step, before the trainer may load its best model."""
        self._open.finish()
        self._open.wait_for_files()
        # Other ranks may load what this one has written.
        self._trainer.accelerator.wait_for_everyone()
        self._rotate()

    def close(self) -> None:
        session, self.session = self._open, None
        session.close(may_end_early=False)

    def abandon(self, error: BaseException) -> None:
        """Release the session after an error, or after all ranks have agreed to stop."""
        session, self.session = self.session, None
        if session is None:
            return
        if session.should_stop and isinstance(error, SystemExit):
            session.close()
        else:
            session.__exit__(type(error), error, error.__traceback__)

    def _leave(self) -> None:
        """End the program: what follows `train` is for a model that is trained to its end."""
        session = self._open
        if session.rank == 0:
            report(f"holdfast: stopped after step {session.step}; the same command continues it")
        raise SystemExit(DONE)

    # --- metrics, phases and directories --------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def observe(self) -> None:
        """Let the session watch the step's loss, which the trainer's logs may average or filter."""
        session, loss, self._loss = self.session, self._loss, None
        if session is not None and loss is not None:
            session.observe(loss)

    def log(self, logs: Mapping[str, Any]) -> None:
        if self.session is not None:
            numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float)}
            self.session.log(**numbers)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a slow phase of the session, if one is open."""
        with contextlib.ExitStack() as held:
            if self.session is not None:
                held.enter_context(self.session.phase(name))
            yield

    @contextlib.contextmanager
    def writing_directory(self) -> Iterator[None]:
        """Mark the directory that the trainer writes, so that no relaunch begins with it.

        The flusher writes its weights, if nothing reads them immediately.
        """
        trainer, args = self._trainer, self._trainer.args
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        directory = Path(args.output_dir) / name
        if args.should_save:
            mark(directory, self._open.run_directory)
        with contextlib.ExitStack() as held:
            if may_wait(trainer):
                held.enter_context(in_background(self._open, directory))
            yield

    def request_save(self) -> None:
        """Request a checkpoint of this step, and a rotation of directories when it is committed."""
        self._open.checkpoint()
        state = self._trainer.state
        self._rotation = state.global_step, state.best_model_checkpoint

    def _rotate(self) -> None:
        """Delete directories beyond `save_total_limit`, once a resume no longer needs them.

        Until the checkpoint is committed, a crash leads back to an earlier step, whose best model
        may be in an older directory.
        """
        trainer, rotation = self._trainer, self._rotation
        if rotation is None or self._open.committed_step < rotation[0]:
            return
        self._rotation = None
        if trainer.args.should_save:
            rotate_checkpoints(
                output_dir=trainer.args.output_dir,
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=rotation[1],
                use_mtime=True,
            )

    def _forget_missing_best(self) -> None:
        state = self._trainer.state
        best = state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            report(f"holdfast: the directory of the best model, {best}, does not exist any more")
            state.best_model_checkpoint = None

    @property
    def _open(self) -> FrameworkSession:
        assert self.session is not None
        return self.session
