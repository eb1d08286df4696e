"""The loader of `Session.stream`: batches of a stream, and the state of what it delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.data.order import SkipWindow, permute
from holdfast.trainer.streams.division import (
    Cursor,
    Division,
    Group,
    LaneState,
    divide,
    joined,
    next_width,
)
from holdfast.trainer.streams.lanes import Delivery, Epoch, LaneData, Share
from holdfast.trainer.streams.source import Source, names_of, sized

T = TypeVar("T")

# Arguments of a DataLoader that only its workers use.
OF_WORKERS: Final = ("prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
# What a resume must find unchanged, because positions of the checkpoint depend on it.
_FIXED: Final = ("shards", "digest", "seed", "shuffle", "buffer")
# A change of these divides the rest of the epoch again.
_DIVIDING: Final = ("parts", "batch", "workers", "open_shards")


class Ranks(Protocol):
    """The other ranks. Every rank calls the same methods in the same order."""

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Return the results of `compute` by rank."""
        ...

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks."""
        ...


class TrainingPlace(Protocol):
    """The position of training."""

    @property
    def next_step(self) -> int:
        """The current step, counted from 1."""
        ...

    @property
    def skips(self) -> tuple[SkipWindow, ...]:
        """The recorded windows of skipped data."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What the program chose. `loader` has further arguments of torch's DataLoader.

    With a `filler`, every batch has `batch` samples: see `Share`.
    """

    batch: int
    seed: int
    shuffle: bool = False
    buffer: int = 0
    open_shards: int = 1
    num_workers: int = 0
    drop_last: bool = False
    repeat: bool = False
    collate: Callable[[list[Any]], Any]
    transform: Callable[[Any], Any] | None = None
    filler: Any = None
    loader: Mapping[str, Any]


class SkippedBatches:
    """Counts the batches to leave out because of the recorded skip windows, each window once."""

    def __init__(self, place: TrainingPlace) -> None:
        self._place = place
        self._seen: set[SkipWindow] = set()

    def before_step(self, batches_per_step: int) -> int:
        """Return how many batches to leave out before the batch of the current step."""
        windows = {w for w in self._place.skips if w.first_step == self._place.next_step}
        new = windows - self._seen
        self._seen |= new
        return sum(window.steps for window in new) * batches_per_step


class StreamLoader:
    """Iterates over the batches of a stream, an epoch at a time. `Session.stream` makes one.

    An iteration yields the rest of the current epoch, also after a `break`. On the ranks, it has
    the same number of batches. Iterate in the thread that trains.
    """

    def __init__(
        self,
        source: Source,
        options: StreamOptions,
        *,
        part: int,
        parts: int,
        ranks: Ranks,
        place: TrainingPlace,
    ) -> None:
        """Let this rank read part `part` of `parts`. Raises `SpecError` for unusable names."""
        # A note for people, or "".
        self.note = ""
        # With gradient accumulation, the program sets this.
        self.batches_per_step = 1
        if size := int(getattr(source, "buffer", 0)):
            self.note = (
                f"the stream is shuffled in blocks of {size} samples in place of the dataset's "
                "shuffle buffer of this size, whose content no checkpoint has"
            )
            options = replace(options, shuffle=True, buffer=size)
        elif getattr(source, "shuffles_shards", False) and not options.shuffle:
            options = replace(options, shuffle=True, buffer=0)
        if (finish := getattr(source, "finish_sample", None)) is not None:
            options = replace(options, transform=_Both(finish, options.transform))
        self._source, self._options, self._names = source, options, tuple(names_of(source))
        self._part, self._parts, self._ranks = part, parts, ranks
        # A program's own source may name its files without their sizes.
        self._digest = digest_of("\0".join(sized(self._names)).encode())
        self._reader: Iterator[Delivery] | None = None
        self._ahead: Delivery | None = None
        # Whether the ranks know if the epoch has another batch.
        self._is_agreed = False
        self._skipped = SkippedBatches(place)
        # The places of this division as `state_dict` has them. They stay the same until the next.
        self._dealt_places: tuple[bytes, int] | None = None
        self._begin_epoch(0)

    # --- iteration ------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next batch."""
        return self._epoch.epoch

    @property
    def shards(self) -> Sequence[str]:
        """The names of the source's shards."""
        return self._names

    def __iter__(self) -> Iterator[Any]:
        return StreamBatches(self)

    def close(self) -> None:
        """Stop the workers. An iteration continues with new ones."""
        self._reader = self._ahead = None
        self._is_agreed = False

    def next_of(self, epoch: int) -> Any:
        """Return the next batch of an epoch. Raises `StopIteration` if the epoch is over."""
        skipping = self._skipped.before_step(self.batches_per_step)
        while self._options.repeat or self.epoch == epoch:
            found = self._deliver()
            if found is None:
                self._end_epoch()
            elif skipping:
                skipping -= 1
            else:
                return found.batch
        raise StopIteration

    @property
    def given(self) -> int:
        """The number of batches of this epoch that were given."""
        return self._given

    def has_next(self) -> bool:
        """Return whether the epoch has another batch, which is read now and given later.

        All ranks call this together. The state is still that of the batches that were given.
        """
        return self._await_next() is not None

    def reads(self, source: Source) -> bool:
        """Return whether a source has the shards of this one."""
        return tuple(names_of(source)) == self._names

    def _deliver(self) -> Delivery | None:
        """Return the next batch, or None at the end of the epoch. All ranks call this together."""
        found = self._await_next()
        if found is not None:
            self._advance(found)
        return found

    def _await_next(self) -> Delivery | None:
        while not self._is_agreed:
            if self._ahead is None:
                self._ahead = next(self._open(), None)
            has_ended = self._ahead is None
            if self._groups > 1:
                has_ended = bool(self._ranks.largest([has_ended])[0])
            if has_ended and not self._is_last:
                self._divide_again()
            else:
                self._is_agreed = True
        return self._ahead

    def _advance(self, found: Delivery) -> None:
        """Note that the program got a batch."""
        self._ahead, self._is_agreed = None, False
        self._opened[found.lane] = found.mark.opened
        self._unopened[found.lane] = found.mark.unopened
        self._turn = (found.lane + 1) % len(self._opened)
        self._given += 1
        self._has_progress = True

    def _end_epoch(self) -> None:
        if self._given == 0:
            raise SpecError(
                f"epoch {self.epoch} of the stream has no batch: it has fewer samples than the "
                f"{self._parts} parts of a step{' or than a step' * self._options.drop_last}; give "
                "the source more samples, or use fewer ranks"
            )
        self._begin_epoch(self.epoch + 1)

    # --- division -------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return self._parts * max(1, self._options.num_workers)

    def _epoch_of(self, number: int) -> Epoch:
        options, count = self._options, len(self._names)
        order = np.arange(count, dtype=np.uint64)
        if options.shuffle:
            order = permute(order, count, options.seed, number)
        return Epoch(
            names=self._names,
            order=tuple(order.tolist()),
            seed=options.seed,
            epoch=number,
            buffer=options.buffer if options.shuffle else 0,
            open_shards=options.open_shards,
        )

    def _begin_epoch(self, number: int) -> None:
        self._epoch, self._given = self._epoch_of(number), 0
        self._begin(divide(LaneState((), tuple(range(len(self._names)))), self._parts, self._width))

    def _begin(self, division: Division) -> None:
        """Read this rank's part of a new division."""
        self.close()
        self._dealt_places = None
        group = division.group_of(self._part)
        self._group, self._groups = group, len(division.groups)
        self._division_width, self._is_last = division.width, division.is_last
        self._opened = [lane.opened for lane in group.lanes]
        self._unopened = [len(lane.unopened) for lane in group.lanes]
        self._turn, self._has_progress = 0, False

    def _divide_again(self) -> None:
        """Divide what is left of the epoch, because one rank can give no full batch."""
        rows = self._ranks.gather(self.state_dict)
        self._take_rest(rows, self._division_width)

    def _take_rest(self, rows: Sequence[Mapping[str, Any]], width: int | None = None) -> None:
        """Divide what is left by the `rows` of all ranks, after a division of `width` if given."""
        # The members of a group have read the same.
        groups = {row["group"][0]: row for row in rows}
        rest = joined(lane for row in groups.values() for lane in self._lanes_of(row))
        if width is None:
            width = self._width
        else:
            width = next_width(width, rest, has_progress=self._has_progress)
        self._begin(divide(rest, self._parts, width))

    def _open(self) -> Iterator[Delivery]:
        """Return the iterator of this rank's lanes, from the next lane on."""
        if self._reader is not None:
            return self._reader
        lanes = list(enumerate(self._rest()))
        lanes = lanes[self._turn :] + lanes[: self._turn]
        options, group = self._options, self._group
        share = Share(
            member=self._part - group.first,
            members=group.members,
            batch=options.batch,
            is_last=self._is_last,
            drop_last=options.drop_last,
            filler=options.filler,
        )
        data = LaneData(self._source, self._epoch, lanes, share, options.collate, options.transform)
        workers = len(lanes) if options.num_workers else 0
        loader = DataLoader(
            data,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            # The seed of the workers, which would otherwise be drawn from the program's generator.
            generator=new_generator(),
            **(options.loader if workers else without_workers(options.loader)),
        )
        self._reader = iter(loader)
        return self._reader

    def _rest(self) -> list[LaneState]:
        """Return what is left of this group's lanes after the delivered batches."""
        return [
            LaneState(opened, lane.unopened[len(lane.unopened) - left :])
            for opened, left, lane in zip(
                self._opened, self._unopened, self._group.lanes, strict=True
            )
        ]

    # --- state ----------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what is the same on all ranks and decides how a resume continues."""
        options = self._options
        return {
            "shards": len(self._names),
            "digest": self._digest,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "buffer": options.buffer if options.shuffle else 0,
            "parts": self._parts,
            "batch": options.batch,
            "workers": options.num_workers,
            "open_shards": options.open_shards,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state after the delivered batches, as plain data."""
        group = self._group
        if self._dealt_places is None:
            self._dealt_places = _dealing_of(group.lanes, len(self._names))
        places, first = self._dealt_places
        return {
            "epoch": self.epoch,
            "given": self._given,
            "part": self._part,
            "group": [group.number, group.first, group.members],
            "groups": self._groups,
            "width": self._division_width,
            "is_last": self._is_last,
            "has_progress": self._has_progress,
            "turn": self._turn,
            "opened": [
                [[one.place, one.position, one.before, one.taken] for one in opened]
                for opened in self._opened
            ],
            "unopened": list(self._unopened),
            "places": places,
            "first": first,
        }

    def resume(self, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
        """Continue after the saved state. All ranks call this together, each with its `rows`.

        At the same size, a rank's rows are its own one. Otherwise the ranks have all rows together.
        Returns a line for people if the rest was divided again, or "". Raises `CheckpointError` if
        the source or an option has changed.
        """
        now = self.facts()
        # Earlier checkpoints have a digest of the names without the sizes of files.
        if facts.get("digest") == digest_of("\0".join(self._names).encode()):
            now["digest"] = facts["digest"]
        if changed := [key for key in _FIXED if facts.get(key) != now[key]]:
            raise CheckpointError(_describe(changed, facts, now))
        mine = [row for row in rows if row["part"] == self._part]
        differing = [key for key in _DIVIDING if facts.get(key) != now[key]]
        # Other ranks may have read this rank's row: several ranks may get the same part.
        if self._ranks.largest([bool(differing) or not mine])[0]:
            rows = [row for each in self._ranks.gather(lambda: rows) for row in each]
            mine = [row for row in rows if row["part"] == self._part]
        row = rows[0]
        self._epoch, self._given = self._epoch_of(int(row["epoch"])), int(row["given"])
        if differing:
            self._take_rest(rows)
            what = ", ".join(f"{key} {facts.get(key)} → {now[key]}" for key in differing)
            return (
                f"the rest of epoch {self.epoch} of the stream was divided again ({what}): each "
                "sample that is left comes once, in another order"
            )
        self._adopt(mine[0])
        return ""

    def _adopt(self, row: Mapping[str, Any]) -> None:
        """Continue a rank's own state at the same size."""
        self.close()
        self._dealt_places = None
        number, first, members = row["group"]
        lanes = tuple(LaneState((), places) for places in _dealt(row, len(self._names)))
        self._group, self._groups = Group(number, first, members, lanes), int(row["groups"])
        self._division_width, self._is_last = int(row["width"]), bool(row["is_last"])
        self._has_progress, self._turn = bool(row["has_progress"]), int(row["turn"])
        self._opened = [lane.opened for lane in self._lanes_of(row)]
        self._unopened = [int(left) for left in row["unopened"]]

    def _lanes_of(self, row: Mapping[str, Any]) -> list[LaneState]:
        """Return what is left of the lanes of a saved state."""
        places = _dealt(row, len(self._names))
        return [
            LaneState(tuple(Cursor(*one) for one in opened), lane[len(lane) - int(left) :])
            for opened, left, lane in zip(row["opened"], row["unopened"], places, strict=True)
        ]


class EpochStream(Protocol):
    """A loader of `Session.stream`. Each iteration gives the rest of the current epoch."""

    @property
    def epoch(self) -> int: ...

    @property
    def given(self) -> int: ...

    def next_of(self, epoch: int) -> Any: ...

    def has_next(self) -> bool: ...

    def reads(self, source: Any) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...


class StreamBatches:
    """One iteration: the rest of an epoch, or without an end if the stream repeats."""

    def __init__(self, loader: EpochStream) -> None:
        self._loader, self._epoch = loader, loader.epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._loader.next_of(self._epoch)

    @property
    def _num_yielded(self) -> int:
        """The number of batches before the next one in its epoch, as torch's iterators have it."""
        return self._loader.given


def _dealing_of(lanes: Sequence[LaneState], count: int) -> tuple[bytes, int]:
    """Return a bit for each place of an epoch, and the lane that has the first of these places.

    The lanes have the places in turn. The size does not depend on the position.
    """
    bits = np.zeros(count, dtype=np.uint8)
    for lane in lanes:
        bits[list(lane.unopened)] = 1
    heads = [(lane.unopened[0], number) for number, lane in enumerate(lanes) if lane.unopened]
    return np.packbits(bits).tobytes(), min(heads, default=(0, 0))[1]


def _dealt(row: Mapping[str, Any], count: int) -> list[tuple[int, ...]]:
    """Return the places of each lane at the start of the division, opened later or not."""
    bits = np.unpackbits(np.frombuffer(row["places"], dtype=np.uint8), count=count)
    places = np.flatnonzero(bits).tolist()
    lanes, first = len(row["unopened"]), int(row["first"])
    return [tuple(places[(lane - first) % lanes :: lanes]) for lane in range(lanes)]


def _describe(changed: Sequence[str], facts: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return why a saved state cannot continue."""
    what = ", ".join(f"{key} {facts.get(key)} → {now[key]}" for key in changed)
    if "digest" in changed:
        return (
            f"the shards of the stream are not those of the checkpoint ({what}): one was added or "
            "removed, its name or size has changed, or a step that gives its samples, so positions "
            "in them mean nothing. Restore the shards, or begin the stream afresh with exclude or "
            "another name"
        )
    return (
        f"the stream is not the one of the checkpoint ({what}). Give it the former values, or "
        "begin it afresh with exclude or another name"
    )


def _as_it_is(found: Any) -> Any:
    return found


class _Both:
    """The source's last steps for a sample, and then the program's transform."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any] | None) -> None:
        self._first, self._second = first, second

    def __call__(self, sample: Any) -> Any:
        found = self._first(sample)
        return found if self._second is None else self._second(found)


def new_generator() -> Any:
    """Return torch's generator with a fixed seed."""
    import torch

    return torch.Generator().manual_seed(0)


def without_workers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader that it accepts without workers."""
    return {key: value for key, value in given.items() if key not in OF_WORKERS}
