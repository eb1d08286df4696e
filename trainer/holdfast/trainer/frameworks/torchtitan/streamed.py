"""torchtitan's loaders of text over a stream of `datasets`, read by the session's loader.

torchtitan divides such a stream among the ranks first, and packs the documents of a rank into
sequences. Here, its own dataset packs each shard, so the session can divide the shards again at
another data-parallel degree. The state of that dataset is the position in a shard. It has the
tokens that fill no sequence yet.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.hf_datasets.text_datasets import ChatDataset, HuggingFaceTextDataset

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.streamed import stream_arguments
from holdfast.trainer.session.streaming import PASSED_ON
from holdfast.trainer.streams.convert import HuggingFaceStream, why_inexact
from holdfast.trainer.streams.loader import StreamLoader, StreamOptions
from holdfast.trainer.streams.source import Source

_BUFFERS: Final = ("_inputs_buffer", "_labels_buffer", "_positions_buffer")
# Of the loader: what decides its batches, and what its state is.
_OWN_METHODS: Final = ("__iter__", "state_dict", "load_state_dict")

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class _EndOfShardError(Exception):
    """Raised where torchtitan's dataset would begin its data again."""


class PackedShards(Source):
    """Sequences of tokens from the shards of a stream. `dataset` is torchtitan's own.

    At the end of a shard, the tokens that fill no sequence are filled up, with labels that count
    in no loss. So each token of an epoch is given once, at every degree.
    """

    def __init__(self, dataset: Any, degree: int) -> None:
        """Raises `SpecError` for a stream that no resume could continue."""
        given = dataset._data
        divided = given._distributed
        if divided is None or divided.world_size != degree:
            raise SpecError(
                "the stream was divided by split_dataset_by_node before torchtitan divided it; "
                "expected the whole stream in its DatasetConfig, because the session divides it"
            )
        if why := why_inexact(given, with_buffers=False):
            raise SpecError(
                f"the {type(dataset).__name__} reads a stream that cannot continue after {why}. Do "
                "the work of map and filter in sample_processor"
            )
        whole = copy.copy(given)
        whole._distributed = None
        self._dataset, self._stream = dataset, HuggingFaceStream(whole)
        self.buffer = self._stream.buffer

    def shards(self) -> Sequence[str]:
        """Return the names of the stream. Blocks of sequences depend on the length, too."""
        length = f", {self._dataset.seq_len} tokens" if self.buffer else ""
        return [f"{name}{length}" for name in self._stream.shards()]

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the sequences of a shard from a state of torchtitan's dataset on."""
        packer = self._packer(shard)
        if position is not None:
            packer.load_state_dict(_unpacked(position))

        def state() -> Any:
            return _packed(packer.state_dict())

        with contextlib.suppress(_EndOfShardError):
            for sequence in packer:
                yield sequence, state
        while rest := packer._inputs_buffer[: packer.seq_len]:
            yield self._take(packer, len(rest)), state

    @property
    def filler(self) -> Sample:
        """A sequence that counts in no loss."""
        return self._sequence([], [], [])

    def _packer(self, shard: str) -> Any:
        """Return a copy of torchtitan's dataset that reads one shard once."""
        packer = copy.copy(self._dataset)
        for name, value in vars(packer).items():
            if isinstance(value, list):
                # It changes its buffers in place.
                setattr(packer, name, list(value))
        part = self._stream.part(shard.removesuffix(f", {packer.seq_len} tokens"))
        packer._data = packer._original_data = part
        # A dataset with an end would log that it has run out of data.
        packer.infinite, packer.reloop = True, _end
        return packer

    def _take(self, packer: Any, size: int) -> Sample:
        """Take `size` tokens out of the buffers, and fill them up to a sequence."""
        taken = []
        for name in _BUFFERS:
            buffer = getattr(packer, name)
            taken.append(buffer[:size])
            setattr(packer, name, buffer[size:])
        inputs, labels, positions = taken
        # The rest of a document that a former sequence began.
        first = positions[0]
        ends = positions.index(0) if 0 in positions else size
        positions = [at - first for at in positions[:ends]] + positions[ends:]
        return self._sequence(inputs, labels, positions)

    def _sequence(self, inputs: list[int], labels: list[int], positions: list[int]) -> Sample:
        missing = self._dataset.seq_len - len(inputs)
        filling = getattr(self._dataset._tokenizer, "eos_id", None) or 0
        found = {
            "input": torch.tensor(inputs + [filling] * missing, dtype=torch.long),
            "positions": torch.tensor(positions + list(range(missing)), dtype=torch.long),
        }
        return found, torch.tensor(labels + [IGNORE_INDEX] * missing, dtype=torch.long)


class StreamOfLoader:
    """The stream of one of torchtitan's loaders. The trainer iterates over it in its place.

    `stream` is None until the session is open.
    """

    def __init__(self, loader: Any) -> None:
        """Raises `SpecError` for a stream that no resume could continue."""
        self._loader = loader
        self._source = PackedShards(loader.dataset, loader.dp_world_size)
        self.stream: StreamLoader | None = None

    def open(self, session: FrameworkSession, name: str, batches_per_step: int) -> None:
        """Continue where the checkpoint says. A step has `batches_per_step` batches."""
        loader, fields = self._loader, ("batch_size", "num_workers", "collate_fn", "drop_last")
        given = {field: getattr(loader, field, None) for field in (*fields, *PASSED_ON)}
        source, found = stream_arguments(SimpleNamespace(dataset=self._source, **given))
        options = StreamOptions(
            batch=loader.batch_size,
            seed=session.seed,
            num_workers=loader.num_workers,
            repeat=loader.dataset.infinite,
            collate=loader.collate_fn,
            filler=self._source.filler,
            loader={field: found[field] for field in PASSED_ON if field in found},
        )
        part, parts = loader.dp_rank, loader.dp_world_size
        self.stream = session.stream_of_part(source, options, name, part=part, parts=parts)
        self.stream.batches_per_step = batches_per_step

    def __iter__(self) -> Iterator[Any]:
        stream = self.stream
        assert stream is not None
        # Without an end, there is one epoch.
        return iter(stream if self._loader.dataset.infinite or not stream.epoch else ())


def stream_of(loader: BaseDataLoader | None) -> StreamOfLoader | None:
    """Return the stream of a loader, or None if the loader keeps its own place.

    Raises `SpecError` for a stream that no resume could continue.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, HuggingFaceTextDataset | ChatDataset):
        return None
    if not hasattr(dataset._data, "_ex_iterable"):
        return None
    kinds = (ParallelAwareDataloader, StatefulDataLoader)
    for name in _OWN_METHODS:
        expected = next(vars(kind)[name] for kind in kinds if name in vars(kind))
        if getattr(type(loader), name, None) is not expected:
            return None
    return StreamOfLoader(loader)


def _end() -> None:
    raise _EndOfShardError


def _packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its lists of tokens as bytes, which are small and no longer change."""
    return {
        name: np.asarray(value, dtype=np.int32).tobytes() if isinstance(value, list) else value
        for name, value in state.items()
    }


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.frombuffer(value, dtype=np.int32).tolist() if isinstance(value, bytes) else value
        for name, value in state.items()
    }
