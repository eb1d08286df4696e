"""What a program has as data, such as a stream of `datasets`, as a source that names its shards."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.errors import SpecError
from holdfast.trainer.state.torchdata_loaders import draws_unsaved_order, pipeline_parts
from holdfast.trainer.streams.seeds import SeededRead
from holdfast.trainer.streams.source import WHAT_WORKS, Source, sized
from holdfast.trainer.streams.tar import TarMember, TarShards, grouped

_BUFFER: Final = "BufferShuffledExamplesIterable"
_FUNCTION: Final = "ExamplesIterable"
# Older versions of datasets lose the rest of a block of samples after these steps.
_EXACT_SINCE: Final = (5, 1)
_LOSSY: Final = ("Filtered", "Mapped")
# Attributes of a step of `datasets` that decide which samples it gives, and in which order.
_DECIDING: Final = (
    *("kwargs", "n", "num_times", "batch_size", "stopping_strategy", "probabilities", "generator"),
)
# Without a seed, numpy draws 128 bits. Before numpy 2, the copy of a generator forgot them.
_SEED_MAX: Final = 1 << 64
_DEPTH_MAX: Final = 200
PACKAGE: Final = "webdataset"
_DROPPING: Final = ("_rsample", "_select")
_OF_ONE_SAMPLE: Final = (
    *_DROPPING,
    *("_associate", "_decode", "_extract_keys", "_info", "_log_keys", "_map", "_map_dict"),
    *("_map_tuple", "_rename", "_rename_keys", "_to_tuple", "_xdecode"),
)
_REPLACED: Final = (
    *("StreamingOpen", "check_empty", "non_empty", "single_node_only"),
    *("split_by_node", "split_by_worker"),
)
_READERS: Final = ("group_by_keys", "tar_file_expander", "tarfile_samples")
_BATCHES: Final = (
    "leave it out, because session.stream makes the batches: batch_size or global_batch, and "
    "collate_fn"
)
_OTHER: Final = "expected steps of one sample each, such as map, decode and select"
_INSTEAD: Final = {
    "_batched": _BATCHES,
    "DataLoader": "give session.stream the dataset, and num_workers",
    "WebDataset": "give session.stream the WebDataset itself",
    "DirectoryShardList": "name the files: WebDataset(sorted(...), ...)",
    "FileCache": "leave cache_dir out: shards are read in part, from where they are",
    "ResampledShards": "give WebDataset the files without resampled, and session.stream "
    "repeat=True: a draw with replacement has no epoch in which each sample comes once",
    "resampled_": "leave it out, and pass repeat=True to session.stream",
}


class NodeShards(Source):
    """Shards that pipelines of `torchdata.nodes` read. A position is the state of a pipeline.

    A node that reads ahead, such as a `Prefetcher`, does so in a thread. So random numbers in it
    are not exact: draw them in the `transform` of the stream.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], Any]) -> None:
        """`make` gets a shard's name, and returns the last node of a new pipeline that reads it."""
        self._names, self._make = sized(names), make

    def shards(self) -> Sequence[str]:
        """Return the names, with the sizes of those that are files."""
        return list(self._names)

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over what a pipeline gives from its state `position` on."""
        node = self._make(self._names[shard])
        _check_pipeline(shard, node)
        node.reset(position)

        def state() -> Any:
            # A node may continue to change what it returned.
            return copy.deepcopy(node.state_dict())

        return ((sample, state) for sample in node)


def _check_pipeline(shard: str, last: Any) -> None:
    """Raise `SpecError` if a pipeline gives other samples on another rank or after a resume."""
    for node in pipeline_parts(last):
        name = type(node).__name__
        if draws_unsaved_order(node):
            raise SpecError(
                f"the pipeline of shard {shard!r} has a {name}, whose order its state does not "
                "determine, so a resume would repeat and lose samples; leave it out, and pass "
                "shuffle=True to session.stream"
            )
        size = "num_replicas" if hasattr(node, "num_replicas") else "world_size"
        if (ranks := getattr(node, size, 1)) != 1:
            raise SpecError(
                f"the pipeline of shard {shard!r} has a {name} with {size}={ranks}, so each rank "
                "would read other samples of the shard, and another number of ranks too; pass "
                f"rank=0 and {size}=1, because the stream divides the shards over the ranks"
            )


@dataclass
class _Plan:
    """What a pipeline does: `steps` apply to samples, the first `early` of them on reading."""

    urls: list[str]
    steps: list[Any] = field(default_factory=list)
    early: int = 0
    readers: dict[str, Any] = field(default_factory=dict)
    shuffles: bool = False
    buffer: int = 0


class WebDatasetStream(TarShards):
    """The tars of a `webdataset` pipeline. `buffer` is the size of its shuffle buffer.

    The pipeline's list of shards and its steps for samples are kept. Its reader of tars, its
    division over nodes and workers and its shuffle buffers are replaced, because they have no
    state. Steps up to the last one that may leave out samples run when a shard is read. The later
    ones run on the samples of a batch only, so the samples of a block that is shuffled are not
    decoded yet.
    """

    def __init__(self, pipeline: Any) -> None:
        """Raises `SpecError` for a pipeline with a step whose place no checkpoint could have."""
        plan = _plan_of(pipeline)
        super().__init__([_path_of(url) for url in plan.urls])
        self._urls = dict(zip(self._paths, plan.urls, strict=True))
        self._readers = plan.readers
        self._early, late = plan.steps[: plan.early], plan.steps[plan.early :]
        self.finish_sample = _Steps(late) if late else None
        self.buffer, self.shuffles_shards = plan.buffer, plan.shuffles

    def _samples(self, path: str, members: Iterator[TarMember]) -> Iterator[tuple[Any, Any]]:
        first = {"__url__": self._urls[path]}
        if "://" not in path:
            first["__local_path__"] = path
        place = _Place()
        samples: Iterable[Any] = place.follow(grouped(path, self._chosen(members), first))
        for step in self._early:
            samples = step(samples)
        # Each step reads a sample only when it is asked for the next one.
        for sample in samples:
            yield sample, place.next_at

    def _chosen(self, members: Iterator[TarMember]) -> Iterator[TarMember]:
        """Rename and leave out files as the pipeline does."""
        rename, select = self._readers.get("rename_files"), self._readers.get("select_files")
        for member in members:
            name = member.name
            if name is not None:
                name = rename(name) if rename else name
                if select and not select(name):
                    continue
            yield member._replace(name=name)


class _Place:
    """Where the sample after the last one that was read begins."""

    next_at: Any = None

    def follow(self, pairs: Iterator[tuple[Any, Any]]) -> Iterator[Any]:
        for sample, self.next_at in pairs:
            yield sample


class _Steps:
    """Steps of a pipeline for one sample."""

    def __init__(self, steps: Sequence[Callable[[Any], Iterator[Any]]]) -> None:
        self._steps = steps

    def __call__(self, sample: Any) -> Any:
        samples: Iterator[Any] = iter([sample])
        for step in self._steps:
            samples = step(samples)
        for found in samples:
            return found
        raise SpecError(
            "a step of the webdataset pipeline left out a sample that belongs to a batch already, "
            "as map does if its function returns None, or a handler of errors; leave out samples "
            "with select, before this step"
        )


def from_web_dataset(given: Any) -> WebDatasetStream:
    """Return a pipeline as a source. Raises `TypeError` for other objects of the package."""
    if not isinstance(getattr(given, "pipeline", None), list):
        raise TypeError(
            f"source={type(given).__name__}: expected a webdataset.WebDataset or DataPipeline. To "
            "mix several, give one of them all tars, and open_shards to session.stream; or make a "
            "stream of each, with its name"
        )
    return WebDatasetStream(given)


def _plan_of(pipeline: Any) -> _Plan:
    if pipeline.repetitions != 1:
        raise SpecError(
            "with_epoch and repeat of a webdataset pipeline: leave them out, and pass repeat=True "
            "to session.stream. An epoch has each sample once"
        )
    first, *others = pipeline.pipeline
    if (name := _name_of(first)) != "SimpleShardList":
        raise _refused(name)
    plan = _Plan(list(first.urls), shuffles=first.seed is not None)
    for step in others:
        name = _name_of(step)
        if name in ("_shuffle", "detshuffle"):
            size = _buffer_of(step)
            # WebDataset(shardshuffle=False) adds a buffer of none.
            plan.shuffles = plan.shuffles or size > 1
            # A shuffle before the tars are read is one of shards.
            if plan.readers:
                plan.buffer = max(plan.buffer, size)
        elif name in _READERS:
            plan.readers |= {"is_read": True, **_reader_of(name, step)}
        elif name in _OF_ONE_SAMPLE:
            plan.steps.append(step)
            if name in _DROPPING or _skips_errors(step):
                plan.early = len(plan.steps)
        elif name not in _REPLACED:
            raise _refused(name)
    if not plan.readers:
        raise SpecError("a webdataset pipeline that reads no tars; expected tarfile_to_samples()")
    return plan


def _skips_errors(step: Any) -> bool:
    """Return True if an error of a step may leave out its sample."""
    handler = step.kw.get("handler")
    return handler is not None and _name_of(handler) != "reraise_exception"


def _name_of(step: Any) -> str:
    """Return the name of a step's class, or of the function that it calls.

    A function or class of the program has a name that no step of the package has.
    """
    found = step if callable(step) and hasattr(step, "__qualname__") else getattr(step, "f", None)
    found = type(step) if found is None else found
    name = str(getattr(found, "__name__", type(found).__name__))
    is_theirs = str(getattr(found, "__module__", "")).partition(".")[0] in (PACKAGE, "torch")
    return name if is_theirs else f"{name} of {getattr(found, '__module__', 'the program')}"


def _refused(name: str) -> SpecError:
    nearest = _INSTEAD.get(name, _OTHER)
    return SpecError(
        f"a webdataset pipeline with {name.lstrip('_')}, whose place no checkpoint could have; "
        f"{nearest}"
    )


def _reader_of(name: str, step: Any) -> dict[str, Any]:
    """Return the arguments of a step that reads tars. Raises `SpecError` for others than names."""
    if step.args or (unknown := set(step.kw) - {"handler", "select_files", "rename_files"}):
        raise SpecError(
            f"{name} with {sorted(unknown) if not step.args else step.args}: expected only "
            "select_files and rename_files; use a step of map for anything else"
        )
    return {key: value for key, value in step.kw.items() if key != "handler"}


def _buffer_of(step: Any) -> int:
    if hasattr(step, "bufsize"):
        return int(step.bufsize)
    return int(step.args[0] if step.args else step.kw.get("bufsize", 1000))


def _path_of(url: str) -> str:
    """Return a URL as a path that can be read in part. Raises `SpecError` for a pipe."""
    if url.startswith(("pipe:", "-")):
        raise SpecError(
            f"the shard {url!r} is a pipe, which cannot be read from a position; name it by a URL "
            "that fsspec can read in part, such as s3://, or copy it"
        )
    if url.startswith("file:"):
        return os.path.abspath(url.removeprefix("file:").removeprefix("//"))
    return url


def why_inexact(dataset: Any, *, with_buffers: bool = True) -> str:
    """Return why a `datasets` stream cannot continue from its own state, or "" if it can.

    Pass `with_buffers=False` if shuffle buffers do not matter.
    """
    names = {type(node).__name__ for node in _nodes_below(dataset._ex_iterable, 0)}
    if with_buffers and _BUFFER in names:
        return "its shuffle buffer, whose content no checkpoint has"
    version = import_module("datasets").__version__
    is_old = tuple(map(int, version.split(".")[:2])) < _EXACT_SINCE
    if is_old and any(name.startswith(_LOSSY) for name in names):
        return (
            f"its map or filter, because datasets {version} loses samples when it continues after "
            f"one; expected {'.'.join(map(str, _EXACT_SINCE))} or newer"
        )
    return ""


def _nodes_below(node: Any, depth: int) -> Iterator[Any]:
    yield node
    for inputs in _children(node).values() if depth < _DEPTH_MAX else ():
        for each in inputs:
            yield from _nodes_below(each, depth + 1)


class HuggingFaceStream(Source):
    """The shards of a `datasets.IterableDataset`. `buffer` is the size of its shuffle buffer.

    The position of a shard is the state that `datasets` has for it. That state does not contain the
    samples in a shuffle buffer, so each buffer of `IterableDataset.shuffle` is taken out, and the
    stream shuffles in blocks of its size, whose state is exact.
    """

    def __init__(self, dataset: Any) -> None:
        """Raises `SpecError` for a dataset of one node, whose rest nobody would read.

        Raises it also for steps whose state an old version of `datasets` does not have, and for
        steps without a seed.
        """
        if getattr(dataset, "_distributed", None) is not None:
            raise SpecError(
                "this dataset was divided by split_dataset_by_node; expected the whole dataset, "
                "because the session divides it over the ranks"
            )
        if why := why_inexact(dataset, with_buffers=False):
            raise SpecError(
                f"this stream cannot continue after {why}. Install that, or leave map and "
                "filter out, and do their work in the transform of session.stream"
            )
        _require_seeds(dataset)
        self._dataset = copy.copy(dataset)
        tree, self.buffer = _without_buffers(dataset._ex_iterable, 0)
        if self.buffer:
            self._dataset = type(dataset)(
                tree,
                info=dataset._info.copy(),
                split=dataset._split,
                formatting=dataset._formatting,
                token_per_repo_id=dataset._token_per_repo_id,
            )
        count = int(dataset.num_shards)
        # A shuffle has put several shards into its order.
        texts = _texts_of(dataset._ex_iterable if count > 1 else tree, 0)
        digest = digest_of("\0".join(texts).encode())
        self._numbers = {f"{n} of {count} ({digest})": n for n in range(count)}

    def shards(self) -> Sequence[str]:
        """Return names with a digest of the files' names and, if they are local, their sizes."""
        return list(self._numbers)

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over a shard from a state of `datasets` on."""
        return _after(position, self.part(shard))

    def open_seeded(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Do the same with random numbers in a function of the program that are the same.

        At a position, datasets calls the function again and leaves out its first samples.
        """
        part = self.part(shard)
        for node in _nodes_below(part._ex_iterable, 0):
            if type(node).__name__ == _FUNCTION:
                first = partial(_left_out, node)
                node.generate_examples_fn = SeededRead(node.generate_examples_fn, first)
        return _after(position, part)

    def part(self, shard: str) -> Any:
        """Return a shard as a stream of `datasets`."""
        return self._dataset.shard(num_shards=len(self._numbers), index=self._numbers[shard])


def _after(position: Any, part: Any) -> Iterator[tuple[Any, Any]]:
    if position is not None:
        part.load_state_dict(position)
    return ((sample, part.state_dict) for sample in part)


def _left_out(node: Any) -> int:
    """Return how many samples a node leaves out of what its function is about to give."""
    # Only a node that is iterated over has a state.
    return int((node._state_dict or {}).get("shard_example_idx", 0))


def from_hugging_face(given: Any) -> HuggingFaceStream:
    """Return a stream as a source. Raises `TypeError` for other datasets, which have an index."""
    if not hasattr(given, "_ex_iterable"):
        raise TypeError(
            f"source={type(given).__name__}: this dataset has an index, so give it to a DataLoader "
            "with session.sampler or session.distributed_sampler; or call to_iterable_dataset() "
            "with a num_shards"
        )
    return HuggingFaceStream(given)


def _require_seeds(dataset: Any) -> None:
    """Raise `SpecError` if each rank and each launch would have another order."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return
    for node in _nodes_below(dataset._ex_iterable, 0):
        # The session shuffles a single shard itself.
        has_effect = dataset.num_shards > 1 or type(node).__name__ != _BUFFER
        generator = getattr(node, "generator", None)
        if has_effect and isinstance(generator, np.random.Generator):
            entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
            if isinstance(entropy, int) and entropy >= _SEED_MAX:
                raise SpecError(
                    "a shuffle or interleave_datasets of this stream has no seed, so each rank and "
                    "each launch would get another order; give it one, as in shuffle(seed=0)"
                )


def _children(node: Any) -> dict[str, list[Any]]:
    """Return the inputs of a node of a dataset, by attribute."""
    one, several = getattr(node, "ex_iterable", None), getattr(node, "ex_iterables", None)
    found = {} if one is None else {"ex_iterable": [one]}
    return found if several is None else {**found, "ex_iterables": list(several)}


def _without_buffers(node: Any, depth: int) -> tuple[Any, int]:
    """Return a node without the shuffle buffers below it, and the size of the largest of them."""
    if depth > _DEPTH_MAX:
        raise SpecError(f"a dataset with more than {_DEPTH_MAX} steps: expected fewer")
    if type(node).__name__ == _BUFFER:
        inner, size = _without_buffers(node.ex_iterable, depth + 1)
        return inner, max(size, int(node.buffer_size))
    largest, changed = 0, {}
    for name, inputs in _children(node).items():
        made = [_without_buffers(each, depth + 1) for each in inputs]
        largest = max([largest, *(size for _, size in made)])
        changed[name] = [inner for inner, _ in made]
    if not largest:
        return node, 0
    node = copy.copy(node)
    for name, inputs in changed.items():
        setattr(node, name, inputs[0] if name == "ex_iterable" else inputs)
    return node, largest


def _texts_of(node: Any, depth: int) -> Iterator[str]:
    """Yield what tells two datasets apart: their steps, and the arguments and sizes of leaves."""
    yield type(node).__name__
    for name in _DECIDING:
        yield from _texts_in(getattr(node, name, None), 0)
    for inputs in _children(node).values():
        for each in inputs:
            yield from _texts_of(each, depth + 1)


def _texts_in(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        yield str(path)
        if os.path.isfile(path):
            yield str(os.path.getsize(path))
    elif isinstance(value, int | float):
        yield str(value)
    elif isinstance(value, np.random.Generator):
        yield str(value.bit_generator.state)
    elif hasattr(value, "num_rows"):
        # A dataset with an index, of which each shard has a part.
        yield str(value.num_rows)
    elif depth < _DEPTH_MAX and isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts_in(item, depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, depth + 1)


def as_source(given: Any) -> Source:
    """Return a program's data as a source. Raises `TypeError` if it names no shards."""
    if isinstance(given, Source):
        return given
    if callable(getattr(given, "shards", None)) and callable(getattr(given, "open", None)):
        return _Wrapped(given)
    if type(given).__module__.partition(".")[0] == "datasets":
        return from_hugging_face(given)
    packages = {kind.__module__.partition(".")[0] for kind in type(given).__mro__}
    if "webdataset" in packages:
        return from_web_dataset(given)
    if is_streaming_dataset(given):
        raise TypeError(
            f"source={type(given).__name__}: it divides its samples itself, so it is not a source "
            "of shards; pass it to session.stream, or as the dataset of a framework's loader, "
            "without StreamDataset"
        )
    if "grain" in packages:
        raise TypeError(
            f"source={type(given).__name__} of grain: its state belongs to one number of ranks, so "
            "no other number can share the rest of it. For this number, pass its iterator to "
            'Session, batches = iter(...) and per_rank={"batches": batches}, and loop over '
            "them. For any number, give session.stream the files, as TextLines or TarShards, or "
            "give a DataLoader over the MapDataset the session.sampler"
        )
    if "torchdata" in packages:
        raise TypeError(
            f"source={type(given).__name__}: its state belongs to one number of ranks and loader "
            "workers, so no other number can share the rest of it. For this number, pass it to "
            'Session as per_rank={"loader": loader}. For any number, give session.stream the '
            "dataset, if that names its shards, or NodeShards(names, make) with a pipeline for "
            "each shard"
        )
    raise TypeError(
        f"source={type(given).__name__}: it does not name its shards, so nobody can say which part "
        f"of it was read; {WHAT_WORKS}"
    )


def is_streaming_dataset(given: Any) -> bool:
    """Return True for a `StreamingDataset`, or an object of a class below it."""
    return any(
        kind.__name__ == "StreamingDataset" and kind.__module__.partition(".")[0] == "streaming"
        for kind in type(given).__mro__
    )


class _Wrapped(Source):
    """An object of the program with the methods of a source."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def shards(self) -> Sequence[str]:
        found: Sequence[str] = self._given.shards()
        return found

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        found: Iterator[tuple[Any, Any]] = self._given.open(shard, position)
        return found


class StreamDataset(IterableDataset[Any]):
    """A source with the arguments of `Session.stream` that belong to the data.

    Give it to a framework, as in `DataLoader(StreamDataset(source, shuffle=True), batch_size=4)`.
    The adapter reads it as `Session.stream` does. Without an adapter, and in an evaluation, an
    iteration gives all samples in the order of the source.
    """

    def __init__(
        self,
        source: Any,
        *,
        transform: Callable[[Any], Any] | None = None,
        shuffle: bool = False,
        buffer: int = 1000,
        open_shards: int = 1,
        seed: int | None = None,
    ) -> None:
        """Takes what `Session.stream` takes as a source, and its arguments of these names."""
        super().__init__()
        self.source, self.transform = source, transform
        self.options: dict[str, Any] = {
            "shuffle": shuffle,
            "buffer": buffer,
            "open_shards": open_shards,
            "seed": seed,
        }

    def __iter__(self) -> Iterator[Any]:
        source, info = as_source(self.source), get_worker_info()
        names, finish = source.shards(), getattr(source, "finish_sample", None)
        for name in names if info is None else names[info.id :: info.num_workers]:
            for sample, _ in source.open(name, None):
                found = sample if finish is None else finish(sample)
                yield found if self.transform is None else self.transform(found)
