"""The session around a DeepSpeed engine."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import BUFFER_NAMES, OPTIMIZER_STATE_DICT, PARAM_GROUPS
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from packaging.version import Version
from torch.utils.data import DistributedSampler, RandomSampler

from holdfast.contracts.disk.reading import is_mine
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.data.sampler import ElasticDistributedSampler
from holdfast.trainer.frameworks.streamed import is_stream
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.session.file_session import FileSession
from holdfast.trainer.staging.file_writers import Writer, bytes_writer, torch_writer
from holdfast.trainer.state.file_state import SavedFiles
from holdfast.trainer.streams.loader import StreamLoader
from holdfast.trainer.streams.mosaic import StreamingLoader

# DeepSpeed's checkpoint files: collected from its own `save_checkpoint`, read by its own load.
#
# A checkpoint is a complete save of DeepSpeed: `<tag>/*.pt`, `latest` and `zero_to_fp32.py`. So
# DeepSpeed's tools and `load_checkpoint` read it without Holdfast.

# Load a checkpoint at another number of ranks, through DeepSpeed's universal format.
#
# One rank converts the checkpoint into a separate folder, all ranks load it, and the folder is
# deleted. The checkpoint itself stays as it is. DeepSpeed's load leaves out buffers and frozen
# parameters. With ZeRO stage 3 it also leaves out the options of all parameter groups except the
# first, and mixes up their step counters. All of this is restored here.

MODULE: Final = "module"
# Without ZeRO, every rank has the complete state.
WHOLE_STAGE: Final = 0
WEIGHTS_STAGE: Final = 3
# The tensors per parameter that `deepspeed.checkpoint.ds_to_universal` converts.
CONVERTED: Final = {"exp_avg", "exp_avg_sq"}


def load_converted(engine: Any, saved: SavedFiles, ranks: ControlGroup) -> tuple[Any, Any]:
    """Convert and load a checkpoint. Return what `load_checkpoint` returns. Every rank calls this.

    Raises `CheckpointError`, before the engine changes, if DeepSpeed cannot convert it.
    """
    tag, scratch = saved.facts["tag"], saved.scratch
    try:
        ranks.share(lambda: _convert(saved))
        with universal_loads(engine, True):
            found: tuple[Any, Any] = engine.load_checkpoint(str(scratch), tag)
        _restore_rest(engine, scratch / tag)
        # No rank may delete files that another one still reads.
        ranks.gather(lambda: None)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    return found


@contextlib.contextmanager
def universal_loads(engine: Any, is_universal: bool) -> Iterator[None]:
    """Let the engine load the universal format or its own, whatever its configuration says."""
    config = engine._config
    before = config.load_universal_checkpoint
    config.load_universal_checkpoint = is_universal
    try:
        yield
    finally:
        config.load_universal_checkpoint = before


def _convert(saved: SavedFiles) -> None:
    """Convert the checkpoint into the scratch folder, which an earlier launch may have left."""
    tag, scratch = saved.facts["tag"], saved.scratch
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Worker processes would be forked from a process with threads, so there are none.
    arguments = argparse.Namespace(
        input_folder=str(saved.directory / tag),
        output_folder=str(scratch / tag),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(arguments)
    except Exception as error:
        # DeepSpeed raises many kinds of errors, and asserts.
        raise CheckpointError(
            f"{saved.directory}: DeepSpeed could not convert it from {saved.world_size} ranks: "
            f"{type(error).__name__}: {error}. The checkpoint is unchanged; relaunch on "
            f"{saved.world_size} ranks"
        ) from error


def _restore_rest(engine: Any, folder: Path) -> None:
    """Restore what DeepSpeed's universal load leaves out."""
    is_sharded = engine.zero_optimization_stage() == WEIGHTS_STAGE
    name = (
        "zero_pp_rank_0_mp_rank_00_model_states.pt" if is_sharded else "mp_rank_00_model_states.pt"
    )
    saved = torch.load(folder / name, map_location="cpu", weights_only=False)
    live = dict(engine.module.named_buffers())
    names = set(saved[BUFFER_NAMES])
    if not is_sharded:
        frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
        live |= frozen
        names |= frozen.keys()
    with torch.no_grad():
        for key in names & live.keys() & saved[MODULE].keys():
            live[key].copy_(saved[MODULE][key])
    if is_sharded:
        _restore_groups(engine.optimizer.optimizer, folder)


def _restore_groups(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Restore the options of every parameter group, and give every part its own step counter.

    DeepSpeed gives all groups the options of the first. All parts get the same tensor as their step
    counter, so each part of torch's Adam would count the steps of all parts.
    """
    path = folder / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", weights_only=False)
    groups = saved[OPTIMIZER_STATE_DICT][PARAM_GROUPS]
    for group, former in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in former.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


# The keys of DeepSpeed's own values, beside which it saves those of the program.
RESERVED: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config"),
        "ds_version",
    }
)


def check_keys(client_state: Mapping[str, Any]) -> None:
    """Raise `SpecError` for keys that would overwrite DeepSpeed's own values."""
    if taken := sorted(RESERVED & client_state.keys()):
        raise SpecError(
            f"client_state has {', '.join(taken)}, which DeepSpeed uses for its own values; use "
            "other keys"
        )


class DeepSpeedFiles:
    """Implements `Framework` for one engine. `client_state` has the program's own values."""

    name = "deepspeed"

    def __init__(self, engine: Any, client_state: dict[str, Any]) -> None:
        self._engine, self._client_state = engine, client_state

    def check(self, step: int) -> None:
        """Raise `SpecError` unless the engine made `step` optimizer steps and stands after one."""
        engine, parts = self._engine, self._engine.gradient_accumulation_steps()
        if engine.global_steps != step:
            raise SpecError(
                f"the session completed {step} steps, but the engine made {engine.global_steps} "
                "optimizer steps; expected one in each step of the loop. With gradient "
                f"accumulation, run all {parts} micro-batches in one step, or loop over "
                "session.batches. Remove the program's own load_checkpoint"
            )
        if engine.managed_gradient_accumulation() and engine.micro_steps % parts:
            raise SpecError(
                f"step {step}: the engine has accumulated {engine.micro_steps % parts} of {parts} "
                "micro-batches of the next step, which no checkpoint contains; end the step after "
                "the last micro-batch"
            )

    def facts(self) -> dict[str, Any]:
        """Return the version, the stage, the tag, and the keys of the program's own values."""
        return {
            "version": deepspeed.__version__,
            "zero_stage": self._engine.zero_optimization_stage(),
            "tag": self._tag,
            "client_keys": sorted(self._client_state),
        }

    def why_fixed(self) -> str:
        return why_fixed(self._engine)

    def collect(self) -> dict[str, Writer]:
        """Run DeepSpeed's save with all ranks, without writing its large files.

        The writers refer to the engine's tensors. Raises `SpecError` for a key of `client_state`
        that DeepSpeed uses itself.
        """
        check_keys(self._client_state)
        with tempfile.TemporaryDirectory(prefix="holdfast-deepspeed-") as folder:
            with _recording(self._engine) as recorded:
                self._engine.save_checkpoint(folder, self._tag, dict(self._client_state))
            files = {os.path.relpath(path, folder): write for path, write in recorded.items()}
            # Rank 0 also has `latest` and scripts that DeepSpeed copies.
            for path in Path(folder).iterdir():
                files[path.name] = bytes_writer(path.read_bytes())
        return files

    def read(self, saved: SavedFiles, ranks: ControlGroup) -> Sequence[str]:
        """Load a checkpoint, and convert it first if another number of ranks saved it."""
        self._check_fit(saved)
        engine, tag, notes = self._engine, saved.facts["tag"], []
        if saved.world_size == ranks.world_size or saved.facts["zero_stage"] == WHOLE_STAGE:
            with universal_loads(engine, False):
                path, loaded = engine.load_checkpoint(str(saved.directory), tag)
        else:
            path, loaded = load_converted(engine, saved, ranks)
            notes.append(
                f"DeepSpeed converted the files of {saved.world_size} ranks to its universal format"
            )
        if path is None:
            raise CheckpointError(
                f"{saved.directory}: DeepSpeed found no checkpoint with the tag {tag} there"
            )
        self._client_state.update({key: loaded[key] for key in saved.facts["client_keys"]})
        return notes

    def weights(self) -> Iterable[torch.Tensor]:
        """Return parameters and buffers; with ZeRO stage 3, this rank's parts of parameters."""
        for parameter in self._engine.module.parameters():
            yield getattr(parameter, "ds_tensor", parameter)
        yield from self._engine.module.buffers()

    @property
    def _tag(self) -> str:
        return f"global_step{self._engine.global_steps}"

    def _check_fit(self, saved: SavedFiles) -> None:
        """Raise `CheckpointError` if the engine cannot load the checkpoint."""
        where, facts = saved.directory, saved.facts
        stage = self._engine.zero_optimization_stage()
        if not is_mine(where):
            raise CheckpointError(
                f"{where} belongs to another user. DeepSpeed's files are pickles, which can run "
                "code when they are loaded. Copy the directory to load it all the same"
            )
        if _minor(facts["version"]) != _minor(deepspeed.__version__):
            raise CheckpointError(
                f"{where}: DeepSpeed {facts['version']} wrote it, and {deepspeed.__version__} is "
                f"installed. Install deepspeed {_minor(facts['version'])}.* to continue this run"
            )
        if facts["zero_stage"] != stage:
            raise CheckpointError(
                f"{where}: saved with ZeRO stage {facts['zero_stage']}, and the program uses stage "
                f"{stage}. Restore the stage in DeepSpeed's configuration"
            )


def _minor(version: str) -> str:
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor}"


class _Recorder(CheckpointEngine):
    """Records what DeepSpeed saves, instead of writing it."""

    def __init__(self, engine: Any, *, as_zip: bool) -> None:
        super().__init__()
        self.name = "Holdfast"
        self._engine, self._as_zip = engine, as_zip
        self.writers: dict[str, Writer] = {}

    def create(self, info: object) -> None:
        """Do nothing: the files have their place in the slot."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, for the same reason."""

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        self.writers[path] = torch_writer(state_dict, as_zip=self._as_zip)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._engine.load(path, map_location)

    def commit(self, info: object) -> bool:
        """Return True. The flusher commits once the files are durable."""
        return True


@contextlib.contextmanager
def _recording(engine: Any) -> Iterator[dict[str, Writer]]:
    """Yield the writers of all that the engine saves meanwhile, by path."""
    own = engine.checkpoint_engine
    recorder = _Recorder(own, as_zip=own.zipfile_serialization)
    engine.checkpoint_engine = recorder
    try:
        yield recorder.writers
    finally:
        engine.checkpoint_engine = own


T = TypeVar("T")


class DeepSpeedSession(FileSession):
    """Makes a DeepSpeed program fault tolerant: a `Session` around what `initialize` returned.

    One step is one optimizer step of the engine, `model_engine.global_steps`.
    """

    def __init__(
        self,
        model_engine: Any,
        client_state: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        interval: int | str | None = None,
        directory: str | Path | None = None,
        best: tuple[str, str] | None = None,
    ) -> None:
        """Resumes from the newest checkpoint that verifies. Call it after `deepspeed.initialize`.

        Args:
            model_engine: the engine, at any ZeRO stage.
            client_state: the program's own values, the same on all ranks, such as counters. Every
                checkpoint contains them. A resume updates this dictionary.
            seed: determines the data order.
            interval: steps (`50`) or seconds (`"10m"`) between checkpoints, or `"auto"`, which is
                the default. `checkpoint.interval` has precedence where the spec has that key.
            directory: the run's folder when there is no agent: see `Session`.
            best: a logged metric and `"min"` or `"max"`: see `Session`.

        Raises `SpecError` for an engine that is not supported, and `CheckpointError` if the newest
        checkpoint does not fit it: another ZeRO stage, another version of DeepSpeed, or a number of
        ranks that DeepSpeed cannot convert it for.
        """
        check_engine(model_engine)
        self.client_state: dict[str, Any] = {} if client_state is None else client_state
        check_keys(self.client_state)
        self._engine = model_engine
        super().__init__(
            DeepSpeedFiles(model_engine, self.client_state),
            seed=seed,
            interval=interval,
            directory=directory,
            best=best,
        )

    def stream(self, /, source: Any, *args: Any, **options: Any) -> StreamLoader | StreamingLoader:
        """Returns a loader over shards, as `Session.stream` does. Each batch is a micro-batch.

        Raises also `SpecError` with gradient accumulation, unless `repeat` is true: an epoch's last
        batches might fill no step.
        """
        parts = int(self._engine.gradient_accumulation_steps())
        if parts > 1 and not options.get("repeat"):
            raise SpecError(
                f"a stream with gradient accumulation over {parts} batches: an epoch might end in "
                "the middle of a step. Pass repeat=True, and loop over session.steps"
            )
        made = super().stream(source, *args, **options)
        made.batches_per_step = parts
        return made

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates over `loader`. Each batch is one micro-batch of the engine.

        A step is complete when the engine has made an optimizer step. A loader of DeepSpeed gets
        the session's data order, which a resume continues at any number of ranks. Raises
        `SpecError` for a loader whose order a resume cannot continue.
        """
        return super().batches(loader)

    def _batches_per_step(self, loader: Iterable[Any]) -> int:
        if isinstance(loader, RepeatingLoader):
            raise SpecError(
                "a RepeatingLoader hides where an epoch ends; pass the loader itself to "
                "session.batches, in a loop over session.epochs"
            )
        if isinstance(loader, DeepSpeedDataLoader) and not is_stream(loader):
            self._give_order(loader)
        super()._batches_per_step(loader)
        return int(self._engine.gradient_accumulation_steps())

    def _give_order(self, loader: Any) -> None:
        """Let a loader of DeepSpeed draw its samples in the session's order."""
        sampler = loader.data_sampler
        if isinstance(sampler, ElasticDistributedSampler):
            return
        if type(sampler) not in {DistributedSampler, RandomSampler}:
            raise SpecError(
                f"this loader has its own sampler ({type(sampler).__name__}), whose order no "
                "resume can continue; give deepspeed_io data_sampler=session.distributed_sampler"
                "(len(dataset), model_engine.train_batch_size(), batch_size=...)"
            )
        loader.data_sampler = self.distributed_sampler(
            len(loader.dataset), self._engine.train_batch_size(), batch_size=loader.batch_size
        )

    def _ends_step(self, _number: int, _parts: int) -> bool:
        return bool(self._engine.global_steps > self.step)


# What an adapter must know of an engine: whether it is supported, and what limits it.


def check_engine(engine: Any) -> None:
    """Raise `SpecError` with every reason why Holdfast cannot save and resume `engine`."""
    if not isinstance(engine, DeepSpeedEngine):
        raise SpecError(
            f"a {type(engine).__name__}: expected the engine, the first value that "
            "deepspeed.initialize returns"
        )
    if problems := _problems(engine):
        raise SpecError(f"this DeepSpeed engine is not supported: {'; '.join(problems)}", problems)


def _problems(engine: Any) -> list[str]:
    writer = engine.checkpoint_engine
    checks = {
        "its module is an engine too; call deepspeed.initialize once": isinstance(
            engine.module, DeepSpeedEngine
        ),
        "pipeline parallelism": isinstance(engine, PipelineEngine),
        "no optimizer; pass one, or its configuration, to deepspeed.initialize": (
            engine.optimizer is None
        ),
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "tensor parallelism": engine.mp_world_size > 1,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "optimizer state on NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "zero_optimization.elastic_checkpoint": bool(engine.zero_elastic_checkpoint()),
        "checkpoint.use_node_local_storage": bool(engine.use_node_local_storage()),
        f"the checkpoint writer {type(writer).__name__}; remove checkpoint.writer and "
        "datastates_ckpt from its configuration, because Holdfast writes in the background": (
            type(writer) is not TorchCheckpointEngine
        ),
    }
    return [problem for problem, is_found in checks.items() if is_found]


def why_fixed(engine: Any) -> str:
    """Return why other ranks cannot load the engine's state, "" if they can."""
    if engine.zero_optimization_stage() == WHOLE_STAGE:
        return ""
    inner = engine.optimizer.optimizer
    kept = {key for state in inner.state.values() for key in state} - {"step"}
    if kept and kept != CONVERTED:
        return (
            f"DeepSpeed converts only {', '.join(sorted(CONVERTED))} of an optimizer, and "
            f"{type(inner).__name__} has {', '.join(sorted(kept))}"
        )
    is_frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    if is_frozen and engine.zero_optimization_stage() == WEIGHTS_STAGE:
        return "DeepSpeed does not convert the frozen parameters of ZeRO stage 3"
    return ""
