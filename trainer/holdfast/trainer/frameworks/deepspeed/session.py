"""The session around a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from torch.utils.data import DistributedSampler, RandomSampler

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data.sampler import ElasticDistributedSampler
from holdfast.trainer.frameworks.deepspeed.engine import check_engine
from holdfast.trainer.frameworks.deepspeed.files import DeepSpeedFiles, check_keys
from holdfast.trainer.session.file_session import FileSession

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
        if isinstance(loader, DeepSpeedDataLoader):
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
                f"this loader has a sampler of its own ({type(sampler).__name__}), whose order no "
                "resume can continue; give deepspeed_io data_sampler=session.distributed_sampler"
                "(len(dataset), model_engine.train_batch_size(), batch_size=...)"
            )
        loader.data_sampler = self.distributed_sampler(
            len(loader.dataset), self._engine.train_batch_size(), batch_size=loader.batch_size
        )

    def _ends_step(self, _number: int, _parts: int) -> bool:
        return bool(self._engine.global_steps > self.step)
