"""`Session.stream`: a loader over shards whose position is part of each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import get_all_start_methods
from typing import Any, Final, TypeVar

from torch.utils.data import default_collate

from holdfast.contracts.errors import SessionError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.arguments import check_seed, truth, whole
from holdfast.trainer.data.order import local_batch
from holdfast.trainer.data.position import Position
from holdfast.trainer.data.sampler import note_on_open_loaders
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.session.lifetime import Lifetime, while_open
from holdfast.trainer.state.run_state import ProgramState, Streams
from holdfast.trainer.streams.convert import StreamDataset, as_source, is_streaming_dataset
from holdfast.trainer.streams.loader import OF_WORKERS, StreamLoader, StreamOptions
from holdfast.trainer.streams.mosaic import StreamingLoader, check_arguments
from holdfast.trainer.streams.source import SHARDS_MAX, Source

T = TypeVar("T")

# Arguments that are passed on to torch's DataLoader.
PASSED_ON: Final = (
    "multiprocessing_context",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
NAME: Final = "stream"
WORKERS_MAX: Final = 1024
BUFFER: Final = 1000
BUFFER_MAX: Final = 1 << 31


class StreamMethods:
    """The part of `Session` that makes streams."""

    seed: int
    _life: Lifetime
    _position: Position
    _ranks: ControlGroup
    _state: ProgramState
    _streams: tuple[StreamLoader | StreamingLoader, ...] = ()
    _looked_in_step: frozenset[bool] = frozenset()
    _has_passed_boundary = False

    @property
    def step(self) -> int:
        """The number of complete optimizer steps."""
        return self._position.completed

    @while_open
    def stream(
        self,
        /,
        source: Source | Any,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        buffer: int = BUFFER,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        repeat: bool = False,
        open_shards: int = 1,
        seed: int | None = None,
        name: str = NAME,
        **loader: Any,
    ) -> StreamLoader | StreamingLoader:
        """Returns a loader over shards, which continues exactly after a resume, at any size.

        Use it in place of a DataLoader over an `IterableDataset`. Each batch is one step. Every
        rank calls this with the same arguments, before its loop.

        Args:
            source: a `Source`, an object with its two methods, a `datasets.IterableDataset`, or a
                `webdataset.WebDataset`. Or a `StreamingDataset` of MosaicML Streaming, which has
                its own batch size and order.
            batch_size: samples of each rank and step.
            global_batch: instead of it, the samples of all ranks in each step.
            shuffle: shuffle the order of the shards, and the samples in blocks of `buffer`.
            buffer: samples of a block, all of one shard. 0 and 1 shuffle the shards only.
            num_workers: processes that read. Each reads other shards.
            collate_fn: makes a batch of a list of samples, as for a DataLoader.
            transform: applied to each sample that this rank gets, in the worker.
            drop_last: leave out the last samples of an epoch if they fill no step of all ranks.
            repeat: continue with the next epoch, without an end.
            open_shards: shards that a worker reads in turn, one sample of each.
            seed: of the order and the transforms. Default: that of the session.
            name: of the state in the checkpoint, for programs with several streams.
            loader: `prefetch_factor`, `pin_memory`, `timeout`, `worker_init_fn` and
                `multiprocessing_context`, as for a DataLoader.

        Raises `TypeError` for a source that names no shards, `SpecError` for an argument,
        `SessionError` after the first step, and `CheckpointError` if the checkpoint's stream had
        other shards, seed or buffer.
        """
        self._require_before_steps()
        position = self._position
        if is_streaming_dataset(source):
            usual = {"shuffle": False, "buffer": BUFFER, "open_shards": 1}
            given = {"shuffle": shuffle, "buffer": buffer, "open_shards": open_shards}
            size = check_arguments(source, given, usual)
            batch_size = size if batch_size is global_batch is None else batch_size
        options = StreamOptions(
            batch=_batch(batch_size, global_batch, position.world_size),
            seed=position.common_seed() if seed is None else check_seed(seed),
            shuffle=truth(shuffle, "shuffle"),
            buffer=whole(buffer, "buffer", most=BUFFER_MAX),
            open_shards=whole(open_shards, "open_shards", least=1, most=SHARDS_MAX),
            num_workers=whole(num_workers, "num_workers", most=WORKERS_MAX),
            drop_last=truth(drop_last, "drop_last"),
            repeat=truth(repeat, "repeat"),
            collate=_function(collate_fn, "collate_fn") or default_collate,
            transform=_function(transform, "transform"),
            loader=_passed_on(loader, num_workers),
        )
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: expected text")
        return self._open_stream(source, options, name, position.rank, position.world_size)

    def _open_stream(
        self, source: Any, options: StreamOptions, name: str, part: int, parts: int
    ) -> StreamLoader | StreamingLoader:
        """Make a stream of which this rank reads `part` of `parts`, and let it continue."""
        made = self._make(source, options, part, parts)
        self._streams += (made,)
        self._report(made.note)
        self._report(_continued(self._state.streams, name, made))
        return made

    def _note_unknown_data(self, *, in_step: bool = False) -> None:
        """Tell the user if the data has a place that the session does not know.

        Looked for once before the first step, and once in a step that the program ends itself.
        """
        if self._streams or self._position.has_order or in_step in self._looked_in_step:
            return
        self._looked_in_step |= {in_step}
        if in_step or not self._position.has_begun:
            self._report(note_on_open_loaders(self._state.saves))

    def _numbered(
        self, loader: Iterable[T], batches: Iterator[T], parts: int
    ) -> Iterator[tuple[int, T]]:
        """Number the batches of `loader`, and check them if it is an iterator around streams."""
        first = self._position.batches_before(parts, batches)
        is_known = not self._streams or any(loader is made for made in self._streams)
        if not (is_known or self._position.has_order or self._state.saves(loader)):
            batches = self._read_in_step(loader, batches)
        return enumerate(batches, first)

    def _read_in_step(self, loader: Iterable[T], batches: Iterator[T]) -> Iterator[T]:
        """Yield batches. Raises `SpecError` if one comes from what an earlier step has read."""
        before = self._places_in_streams()
        for number, batch in enumerate(batches):
            now = self._places_in_streams()
            if number and now == before:
                raise SpecError(
                    f"this {type(loader).__name__} gave a batch without reading the stream, so it "
                    "holds samples that no checkpoint has, and a resume would lose them. Let each "
                    "batch come from what is read in its step: pack or regroup samples in a map "
                    "with batched=True, in the source, or in collate_fn"
                )
            before = now
            yield batch

    def _places_in_streams(self) -> list[tuple[int, int]]:
        return [(made.epoch, made.given) for made in self._streams]

    def _require_before_steps(self) -> None:
        if self._position.has_begun:
            raise SessionError(
                f"stream(): step {self.step} is complete; make streams before the loop begins, so "
                "that each checkpoint has their position"
            )

    def _report(self, text: str) -> None:
        if text and self._ranks.rank == 0:
            report(f"holdfast: {text}")

    def _make(
        self, source: Any, options: StreamOptions, part: int, parts: int
    ) -> StreamLoader | StreamingLoader:
        """Make the loader on all ranks. All raise if one cannot, or if they differ."""
        made: list[StreamLoader | StreamingLoader] = []

        def make() -> dict[str, Any]:
            who: dict[str, Any] = {"parts": parts, "ranks": self._ranks, "place": self._position}
            if is_streaming_dataset(source):
                made.append(StreamingLoader(source, options, **who))
            else:
                made.append(StreamLoader(source_of(source), options, part=part, **who))
            return made[0].facts()

        facts = self._ranks.gather(make)
        if other := [rank for rank, one in enumerate(facts) if one != facts[0]]:
            raise SpecError(
                f"the ranks {other[:8]} made another stream than rank 0: {facts[other[0]]}, and on "
                f"rank 0 {facts[0]}. Every rank must name the same shards in the same order, and "
                "pass the same arguments"
            )
        return made[0]


def _continued(streams: Streams, name: str, made: StreamLoader | StreamingLoader) -> str:
    """Let a stream continue after its saved state, if there is one. Return a line for people."""
    saved = streams.add_rows(name, made)
    if saved is not None:
        return made.resume(saved.facts, saved.rows)
    if others := streams.forgotten_rows():
        return (
            f"the stream {name!r} begins at its start, because the checkpoint has only "
            f"{', '.join(others)}"
        )
    return ""


def _passed_on(loader: Mapping[str, Any], workers: int) -> Mapping[str, Any]:
    """Return arguments for torch's DataLoader. Raises `TypeError` or `SpecError` for others.

    torch would look at them when the first batch is read. Without workers, it takes a function for
    them and refuses the other arguments of workers.
    """
    if unknown := sorted(set(loader) - {*PASSED_ON}):
        raise TypeError(f"stream() got {unknown}: expected further arguments of {PASSED_ON}")
    of_workers = set(OF_WORKERS) - {"worker_init_fn"}
    if not workers and (unused := sorted(name for name in of_workers if loader.get(name))):
        raise SpecError(
            f"stream(): {', '.join(unused)}: num_workers is 0, and no worker would use it; set "
            "num_workers, or leave it out"
        )
    truth(loader.get("pin_memory", False), "pin_memory")
    _function(loader.get("worker_init_fn"), "worker_init_fn")
    if loader.get("prefetch_factor") is not None:
        whole(loader["prefetch_factor"], "prefetch_factor", least=1)
    seconds = loader.get("timeout", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise SpecError(f"timeout={seconds!r}: expected a number of seconds, 0 or more")
    start = loader.get("multiprocessing_context")
    if isinstance(start, str) and start not in (known := get_all_start_methods()):
        raise SpecError(f"multiprocessing_context={start!r}: expected one of {', '.join(known)}")
    return loader


def _function(given: Any, name: str) -> Any:
    """Return a function of the program, or None. Raises `TypeError` for anything else."""
    if given is not None and not callable(given):
        raise TypeError(f"{name}={given!r}: expected a function, or None")
    return given


def _batch(batch_size: int | None, global_batch: int | None, parts: int) -> int:
    """Return the samples of each rank and step. Raises `SpecError`."""
    if (batch_size is None) == (global_batch is None):
        raise SpecError(
            f"batch_size={batch_size}, global_batch={global_batch}: expected one of them"
        )
    if global_batch is not None:
        return local_batch(whole(global_batch, "global_batch", least=1), parts)
    return whole(batch_size, "batch_size", least=1)


def source_of(given: Any) -> Source:
    """Return what a program gave `Session.stream` as a source. Raises `TypeError` for others."""
    if isinstance(given, StreamDataset):
        raise TypeError(
            "source=StreamDataset: it is for the loaders of frameworks; pass its source here, and "
            "its other arguments too"
        )
    return as_source(given)
