"""A data loader for torchtitan whose samples come in Holdfast's order, at every degree.

torchtitan's own loaders divide the data among the ranks first, and keep the state of each rank. So
they continue only at the same data-parallel degree. Here, the samples of a step follow from the
step's number, and all ranks together get the same ones at every degree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data.order import DataOrder
from holdfast.trainer.data.sampler import ElasticSampler
from holdfast.trainer.frameworks.session import FrameworkSession

NO_SEPARATOR: Final = -1

Tokens = npt.NDArray[np.integer[Any]]
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TokenFile(Sequence[Tokens]):
    """Samples of seq_len + 1 tokens in a `.npy` file of token ids, which is mapped into memory.

    Sample i begins at token i * seq_len. Its last token is the first one of sample i + 1. Tokens
    after the last full sample are left out.
    """

    def __init__(self, path: str | Path, seq_len: int) -> None:
        """Raises `SpecError` if the file is missing, not a row of integers, or too short."""
        self._path, self._seq_len = Path(path), seq_len
        self._tokens: Tokens | None = None
        try:
            tokens = self._mapped()
        except (OSError, ValueError) as error:
            raise SpecError(
                f"dataloader.dataset_path={str(path)!r}: {error}; expected a .npy file of token ids"
            ) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise SpecError(
                f"{path}: {tokens.dtype} of shape {tokens.shape}; expected integers of shape (n,)"
            )
        self._count = (len(tokens) - 1) // seq_len
        if self._count < 1:
            raise SpecError(f"{path}: {len(tokens)} tokens; expected {seq_len + 1} or more")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        start = int(index) * self._seq_len
        return self._mapped()[start : start + self._seq_len + 1]

    def __getstate__(self) -> dict[str, Any]:
        # Each worker process maps the file itself.
        return {**self.__dict__, "_tokens": None}

    def _mapped(self) -> Tokens:
        if self._tokens is None:
            self._tokens = np.load(self._path, mmap_mode="r")
        return self._tokens


class TokenDataLoader(BaseDataLoader):
    """Batches of token sequences in Holdfast's order: every sample once in each epoch.

    A subclass may override `open_samples`, to read something else than a `.npy` file.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the `.npy` file of token ids, of shape (n,)."""

        infinite: bool = True
        """Whether to begin another epoch when the data is used up."""

        seed: int = 0
        """Determines the order of the samples."""

        separator: int = NO_SEPARATOR
        """The token that ends each document, or -1. Positions begin again after it."""

        num_workers: int = 0
        """Number of worker processes that read samples."""

        pin_memory: bool = False
        """Copy tensors to CUDA pinned memory before returning them."""

        prefetch_factor: int | None = None
        """Number of batches that each worker reads ahead, with workers only."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_unused: Any,
    ) -> None:
        """Takes what the trainer gives. Raises `SpecError` if there are too few samples."""
        self.seed = config.seed
        self._config, self._seq_len, self._size = config, seq_len, local_batch_size
        self._rank, self._degree = dp_rank, dp_world_size
        self.samples = self.open_samples(config, tokenizer, seq_len)
        if len(self.samples) < local_batch_size * dp_world_size:
            raise SpecError(
                f"{len(self.samples)} samples of {seq_len} tokens; expected "
                f"{local_batch_size * dp_world_size} or more, for one batch on each rank"
            )
        # Without a session, the batches that this rank got so far.
        self._given = 0
        self._sampler: ElasticSampler | None = None

    def open_samples(self, config: Any, tokenizer: Any, seq_len: int) -> Sequence[Any]:
        """Return all samples. Each is `seq_len + 1` token ids as a row of integers.

        The samples must be the same at every start. `tokenizer` is the trainer's.
        """
        if config.dataset or not config.dataset_path:
            raise SpecError(
                f"dataloader.dataset={config.dataset!r}, dataset_path={config.dataset_path!r}: "
                "expected only dataset_path, a .npy file of token ids"
            )
        return TokenFile(config.dataset_path, seq_len)

    def follow(self, session: FrameworkSession, global_batch: int, steps: int) -> None:
        """Give the samples of the session's current step next, up to step `steps`.

        Raises `SpecError` if a step would contain a sample twice.
        """
        self._sampler = session.sampler_of_part(
            len(self.samples), global_batch, steps, part=self._rank, parts=self._degree
        )

    def __iter__(self) -> Iterator[Batch]:
        config, workers = self._config, self._config.num_workers
        loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], self.samples),
            batch_sampler=_MicroBatches(self._ids()),
            collate_fn=self._collate,
            num_workers=workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor if workers else None,
            # Otherwise each iteration would draw a number from the process's own generator.
            generator=torch.Generator(),
        )
        for batch in loader:
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._given * self._size * self._degree, "seed": self.seed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved place. Raises `SpecError` for another seed, or between two batches.

        Under Holdfast's manager, the session's step decides instead.
        """
        if not state_dict:
            return
        self._given, rest = divmod(state_dict["samples"], self._size * self._degree)
        if rest or state_dict["seed"] != self.seed:
            raise SpecError(
                f"the loader was saved after {state_dict['samples']} samples with seed "
                f"{state_dict['seed']}, and cannot continue with seed {self.seed} and batches of "
                f"{self._size * self._degree}; expected the same seed, and a divisor of the samples"
            )

    def _ids(self) -> Iterator[list[int]]:
        if self._sampler is None:
            size, count = self._size * self._degree, len(self.samples)
            order = DataOrder(samples=count, global_batch=size, seed=self.seed)
            for number in itertools.count(self._given + 1):
                if self._is_over(order, number):
                    return
                yield order.rank_ids(number, self._rank, self._degree).tolist()
        else:
            first = self._sampler.first_step
            for step, ids in enumerate(self._sampler, first):
                if self._is_over(self._sampler.order, step):
                    return
                yield from (ids[at : at + self._size] for at in range(0, len(ids), self._size))

    def _is_over(self, order: DataOrder, step: int) -> bool:
        """Return True if `step` is not completely in the only epoch."""
        return not self._config.infinite and order.position(step + 1) > order.samples

    def _collate(self, samples: Sequence[Any]) -> Batch:
        """Return inputs and positions, and labels: int64 of shape (batch, seq_len)."""
        rows = np.stack([np.asarray(sample, dtype=np.int64) for sample in samples])
        inputs, labels = rows[:, :-1], rows[:, 1:]
        separator = self._config.separator
        positions = _positions(inputs, separator)
        if separator != NO_SEPARATOR:
            # The first token of a document does not follow from the one before it.
            labels = np.where(inputs == separator, IGNORE_INDEX, labels)
        found = {"input": inputs, "positions": positions}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in found.items()}
        return tensors, torch.from_numpy(np.ascontiguousarray(labels))


class _MicroBatches(Sampler[list[int]]):
    """A batch sampler over lists of ids, once."""

    def __init__(self, ids: Iterator[list[int]]) -> None:
        self._ids = ids

    def __iter__(self) -> Iterator[list[int]]:
        return self._ids


def _positions(inputs: npt.NDArray[np.int64], separator: int) -> npt.NDArray[np.int64]:
    """Return the place of each token in its document, or in its row, from 0. Same shape."""
    places = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    if separator == NO_SEPARATOR:
        return places
    starts = np.zeros_like(places)
    starts[:, 1:] = np.where(inputs[:, :-1] == separator, places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
