"""Streams: the division of shards is pure, and each sample of an epoch is given once."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer import Session
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.session.streaming import source_of
from holdfast.trainer.state import plain
from holdfast.trainer.streams import Counted, NodeShards, Source, StreamDataset, TextLines
from holdfast.trainer.streams.convert import as_source
from holdfast.trainer.streams.division import (
    Cursor,
    LaneState,
    divide,
    joined,
    last_steps,
    next_width,
    shares,
)
from holdfast.trainer.streams.loader import StreamLoader, StreamOptions
from holdfast.trainer.streams.source import SHARDS_MAX, names_of

T = TypeVar("T")
WAIT_S = 60.0
STATE_BYTES_MAX = 64 * 1024
Batches = list[list[Any]]
# Sorts after the samples of shards with numbers as names.
FILLER: Final = ("none", 0)
# What a checkpoint has: the facts, and the row of each rank.
Saved = tuple[dict[str, Any], list[dict[str, Any]]]


class Alone:
    """The ranks of a program with one."""

    def gather(self, compute: Callable[[], T]) -> list[T]:
        return [compute()]

    def largest(self, values: Sequence[int]) -> list[int]:
        return list(values)


class Together:
    """Ranks that are threads, which exchange what they have in one list."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.values = threading.Barrier(ranks, timeout=WAIT_S), [None] * ranks

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class OneOf:
    """One of the ranks that are threads."""

    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def gather(self, compute: Callable[[], T]) -> list[T]:
        return self._together.exchange(self._rank, compute())

    def largest(self, values: Sequence[int]) -> list[int]:
        rows = self._together.exchange(self._rank, [int(value) for value in values])
        return [max(column) for column in zip(*rows, strict=True)]


class Place:
    """A position of training that does not move by itself."""

    def __init__(self) -> None:
        self.next_step, self.skips = 1, ()


def options_of(batch: int = 4, **more: Any) -> StreamOptions:
    given: dict[str, Any] = {"seed": 1, "collate": list, "loader": {}, **more}
    return StreamOptions(batch=batch, **given)


def numbered(sizes: Sequence[int]) -> Source:
    """Shards of the given sizes. A sample is the name of its shard and its number."""

    def read(name: str) -> Iterator[tuple[str, int]]:
        return iter([(name, number) for number in range(sizes[int(name)])])

    return Counted([str(shard) for shard in range(len(sizes))], read)


def alone(source: Source, **more: Any) -> StreamLoader:
    place = more.pop("place", Place())
    return StreamLoader(source, options_of(**more), part=0, parts=1, ranks=Alone(), place=place)


def check_resumes(loader: Callable[[], StreamLoader], whole: list[Any], every: int = 1) -> None:
    """Stop a loader after each step, or some, and check that a new one gives the rest."""
    for steps in range(1, len(whole), every):
        begun = loader()
        given = [batch for _, batch in zip(range(steps), begun, strict=False)]
        resumed = loader()
        row = plain.from_bytes(plain.to_bytes(begun.state_dict(), "row"))
        assert resumed.resume(begun.facts(), [row]) == ""
        assert given + list(resumed) == whole


def read(
    source: Source,
    ranks: int,
    *,
    saved: Saved | None = None,
    steps: int | None = None,
    copies: int = 1,
    **more: Any,
) -> tuple[list[Batches], Saved]:
    """Read the rest of an epoch, or `steps` batches, on ranks that are threads.

    So many ranks next to each other get the same part.
    """
    together = Together(ranks)
    batches: list[Batches] = [[] for _ in range(ranks)]
    loaders: list[StreamLoader] = []
    errors: list[BaseException] = []
    for rank in range(ranks):
        who: dict[str, Any] = {"part": rank // copies, "parts": ranks // copies}
        who["ranks"] = OneOf(together, rank)
        loaders.append(StreamLoader(source, options_of(**more), place=Place(), **who))

    def act(rank: int) -> None:
        try:
            if saved is not None:
                loaders[rank].resume(saved[0], saved[1][rank::ranks])
            for batch in loaders[rank]:
                batches[rank].append(batch)
                if len(batches[rank]) == steps:
                    break
        except BaseException as error:
            errors.append(error)
            together.barrier.abort()
            raise

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not errors
    # As a checkpoint has them.
    rows = [plain.from_bytes(plain.to_bytes(one.state_dict(), "row")) for one in loaders]
    return batches, (json.loads(json.dumps(loaders[0].facts())), rows)


def flat(batches: list[Batches]) -> list[Any]:
    return sorted(sample for rank in batches for batch in rank for sample in batch)


cursors = st.builds(Cursor, place=st.integers(0, 50), before=st.integers(0, 9))
rests = st.builds(
    LaneState,
    st.lists(cursors, max_size=20, unique_by=lambda one: one.place).map(tuple),
    st.lists(st.integers(60, 200), max_size=60, unique=True).map(tuple),
)


@given(rests, st.integers(1, 20), st.integers(1, 60))
def test_a_division_gives_each_shard_to_one_lane(rest: LaneState, ranks: int, width: int) -> None:
    division = divide(rest, ranks, width)
    lanes = [lane for group in division.groups for lane in group.lanes]
    found = joined(lanes)
    assert sorted(found.unopened) == sorted(rest.unopened)
    assert sorted(found.opened, key=lambda one: one.place) == sorted(
        rest.opened, key=lambda one: one.place
    )
    assert 1 <= len(lanes) <= max(1, min(width, len(rest.opened) + len(rest.unopened)))
    assert division.is_last == (len(lanes) == 1)
    assert len({len(group.lanes) for group in division.groups}) == 1
    # Each rank is in one group, and groups are as equal as possible.
    members = [group.members for group in division.groups]
    assert [division.group_of(rank).number for rank in range(ranks)] == [
        group.number for group in division.groups for _ in range(group.members)
    ]
    assert sum(members) == ranks
    assert max(members) - min(members) <= 1
    sizes = [len(lane.opened) + len(lane.unopened) for lane in lanes]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_the_last_steps_give_each_rank_a_sample_and_leave_none(
    ranks: int, batch: int, data: st.DataObject
) -> None:
    left = data.draw(st.integers(0, ranks * (batch + 1) - 1))
    sizes = last_steps(left, ranks, batch)
    assert sum(sizes) == (left if left >= ranks else 0)
    assert all(min(shares(size, ranks)) >= 1 for size in sizes)
    assert all(max(shares(size, ranks)) <= max(batch, 2) for size in sizes)


@given(rests, st.integers(1, 60), st.booleans())
def test_an_epoch_has_few_divisions(rest: LaneState, width: int, has_progress: bool) -> None:
    after = next_width(width, rest, has_progress=has_progress)
    assert 1 <= after <= width
    assert after < width or width == 1 or (has_progress and len(rest.unopened) > 0) or rest.opened


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=9),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(1, 5),
    st.sampled_from([{}, {"shuffle": True}, {"shuffle": True, "buffer": 4}, {"open_shards": 3}]),
    st.integers(1, 40),
)
def test_each_sample_is_given_once_at_any_size_and_in_the_same_order_at_the_same(
    sizes: list[int], worlds: list[int], batch: int, options: dict[str, Any], at: int
) -> None:
    everything = sorted((str(n), k) for n, size in enumerate(sizes) for k in range(size))
    first, second, third = worlds
    if len(everything) < first:
        return
    source, more = numbered(sizes), {"batch": batch, **options}
    whole, _ = read(source, first, **more)
    assert flat(whole) == everything
    assert len({len(rank) for rank in whole}) == 1
    assert all(batch for rank in whole for batch in rank)
    steps = min(at, len(whole[0]))
    begun, saved = read(source, first, steps=steps, **more)
    assert begun == [rank[:steps] for rank in whole]
    rest, _ = read(source, first, saved=saved, **more)
    assert [a + b for a, b in zip(begun, rest, strict=True)] == whole
    resized, again = read(source, second, saved=saved, steps=2, **more)
    given = begun + resized
    if all(row["epoch"] == 0 for row in again[1]):
        given = given + read(source, third, saved=again, **more)[0]
    found = flat(given)
    assert len(set(found)) == len(found)
    # Fewer samples than ranks may be left when a run grows within the last step of an epoch.
    assert len(everything) - len(found) < max(second, third)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_fillers_leave_no_sample_out_and_batches_of_one_size(
    sizes: list[int], worlds: list[int], batch: int, at: int
) -> None:
    """Fewer samples than ranks are one step, too."""
    everything = sorted((str(n), k) for n, size in enumerate(sizes) for k in range(size))
    if not everything:
        return
    source = numbered(sizes)
    more: Any = {"batch": batch, "filler": FILLER}
    whole, _ = read(source, worlds[0], **more)
    assert flat(whole).count(FILLER) < worlds[0] * batch * 2
    begun, saved = read(source, worlds[0], steps=min(at, len(whole[0])), **more)
    rest = read(source, worlds[1], saved=saved, **more)[0] if has_more(saved) else []
    for found in (whole, begun + rest):
        assert {len(one) for rank in found for one in rank} == {batch}
        assert [sample for sample in flat(found) if sample != FILLER] == everything


def has_more(saved: Saved) -> bool:
    """Return whether the epoch of a checkpoint has more batches."""
    return any(any(row["opened"]) or any(row["unopened"]) for row in saved[1])


def test_ranks_that_get_the_same_part_continue_it_at_another_number_of_copies() -> None:
    source = numbered([9, 7, 8])
    more: Any = {"batch": 2}
    whole, _ = read(source, 2, **more)
    begun, saved = read(source, 4, copies=2, steps=2, **more)
    assert begun == [whole[rank // 2][:2] for rank in range(4)]
    rest, _ = read(source, 2, saved=saved, **more)
    assert rest == [rank[2:] for rank in whole]
    rest, _ = read(source, 6, copies=3, saved=saved, **more)
    assert rest == [whole[rank // 3][2:] for rank in range(6)]


def test_shuffling_depends_on_the_epoch_and_the_seed_and_not_on_the_reader() -> None:
    source = numbered([20, 20, 20])
    loader = alone(source, shuffle=True, buffer=8)
    epochs = [[sample for batch in loader for sample in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    other = [x for batch in alone(source, shuffle=True, buffer=8, seed=2) for x in batch]
    assert sorted(other) == sorted(epochs[0])
    assert other != epochs[0]
    # A buffer larger than the data is one block of each shard.
    large = [x for batch in alone(source, shuffle=True, buffer=10**6) for x in batch]
    assert sorted(large) == sorted(epochs[0])


@pytest.mark.parametrize("buffer", [4, 10**6], ids=["small", "larger than the data"])
def test_workers_give_the_same_batches_after_a_resume(buffer: int) -> None:
    source = numbered([9, 14, 5, 11])
    more: Any = {"shuffle": True, "buffer": buffer, "batch": 3}
    whole = list(alone(source, num_workers=2, **more))
    begun: list[Any] = []
    saved: Any = None
    # Each launch is interrupted, the last one reads the rest.
    for steps in (1, 2, 3, 1, 1, 100):
        loader = alone(source, num_workers=2, **more)
        if saved is not None:
            assert loader.resume(*saved) == ""
        begun += [batch for _, batch in zip(range(steps), loader, strict=False)]
        saved = loader.facts(), [loader.state_dict()]
    assert begun == whole


@pytest.mark.parametrize(("then", "now"), [(2, 0), (0, 2), (1, 3)])
def test_another_number_of_workers_divides_the_rest_again(then: int, now: int) -> None:
    source = numbered([9, 14, 5, 11])
    more: Any = {"shuffle": True, "buffer": 4, "batch": 3}
    loader = alone(source, num_workers=then, **more)
    begun = [batch for _, batch in zip(range(5), loader, strict=False)]
    saved: Any = (loader.facts(), [loader.state_dict()])
    rests = []
    for _ in range(2):
        other = alone(source, num_workers=now, **more)
        assert f"workers {then} → {now}" in other.resume(*saved)
        rests.append(list(other))
    assert rests[0] == rests[1]
    everything = [(str(n), k) for n, size in enumerate([9, 14, 5, 11]) for k in range(size)]
    assert flat([begun, rests[0]]) == sorted(everything)


def test_random_transforms_depend_on_the_sample_and_leave_the_program_s_numbers_alone() -> None:
    def noisy(_: Any) -> float:
        return float(random.random() + np.random.rand() + torch.rand(()).item())

    first = [x for batch in alone(numbered([5, 6]), transform=noisy) for x in batch]
    second = [x for batch in alone(numbered([5, 6]), transform=noisy, batch=3) for x in batch]
    assert first == second
    assert len(set(first)) == len(first)
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2).tolist(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    loader = iter(alone(numbered([5, 6]), transform=noisy))
    next(loader)
    assert (torch.rand(2).tolist(), random.random()) == expected


def read_in_random_order(_: str) -> Iterator[tuple[int, float]]:
    order = list(range(13))
    random.shuffle(order)
    return ((number, random.random() + torch.rand(()).item()) for number in order)


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_reader_that_draws_an_order_gives_the_rest_of_it_after_a_resume(buffer: int) -> None:
    def loader() -> StreamLoader:
        source = Counted(["0", "1", "2"], read_in_random_order)
        return alone(source, batch=1, buffer=buffer, shuffle=buffer > 0, open_shards=2)

    whole = list(loader())
    assert sorted(number for [(number, _)] in whole) == sorted(3 * [*range(13)])
    check_resumes(loader, whole, every=4)


def test_an_iteration_is_the_rest_of_an_epoch() -> None:
    loader = alone(numbered([5, 5]), batch=2)
    batches = iter(loader)
    given = [next(batches), next(batches)]
    assert loader.given == batches._num_yielded == 2  # type: ignore[attr-defined]
    given += loader
    assert flat([given]) == flat([list(loader)])
    assert list(batches) == []
    repeated = iter(alone(numbered([5, 5]), batch=2, repeat=True))
    assert len([next(repeated) for _ in range(12)]) == 12


def test_skipped_steps_leave_out_their_batches_once() -> None:
    place = Place()
    loader = iter(alone(numbered([20]), batch=2, place=place))
    whole = list(alone(numbered([20]), batch=2))
    found = [next(loader)]
    place.next_step, place.skips = 2, (SkipWindow(2, 3),)  # type: ignore[assignment]
    found += [next(loader), next(loader)]
    assert found == [whole[0], whole[4], whole[5]]


def test_the_state_is_small_at_any_position() -> None:
    names = [f"shard-{number}" for number in range(SHARDS_MAX)]
    source = Counted(names, lambda name: iter([name]))
    loader = alone(source, batch=64, shuffle=True)
    batches, sizes = iter(loader), []
    for _ in range(20):
        next(batches)
        sizes.append(len(plain.to_bytes(loader.state_dict(), "row")))
    assert max(sizes) < STATE_BYTES_MAX * 4 // 5
    assert max(sizes) - min(sizes) < 100


class Bare(torch.utils.data.IterableDataset[int]):
    """A stream that names no shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Kept(Bare):
    """A stream with a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": 0}


class Named(torch.utils.data.IterableDataset[int]):
    """A stream that names its shards."""

    def __iter__(self) -> Iterator[Any]:
        for shard in self.shards():
            yield from (sample for sample, _ in self.open(shard, None))

    def shards(self) -> list[str]:
        return ["a", "b"]

    def open(self, shard: str, position: Any) -> Iterator[tuple[str, int]]:
        return iter([(f"{shard}{number}", number + 1) for number in range(position or 0, 3)])


def test_a_stream_that_names_no_shards_is_refused_with_what_works() -> None:
    with pytest.raises(TypeError, match=r"Bare: it does not name its shards.*shards\(\) and open"):
        as_source(Bare())
    assert flat([list(alone(as_source(Named()), batch=2))]) == [
        "a0", "a1", "a2", "b0", "b1", "b2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "no shards"),
        (["a", "a"], "two shards have the name 'a'"),
        ([1], "expected text"),
        ([str(n) for n in range(SHARDS_MAX + 1)], "join some"),
    ],
)
def test_names_that_do_not_work_are_refused(names: list[Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        names_of(Counted(names, iter))


def test_a_changed_stream_is_refused() -> None:
    loader = alone(numbered([5, 5]), shuffle=True, buffer=4)
    next(iter(loader))
    saved: Any = (loader.facts(), [loader.state_dict()])
    with pytest.raises(CheckpointError, match=r"shards 2 → 3.*Restore the shards"):
        alone(numbered([5, 5, 5]), shuffle=True, buffer=4).resume(*saved)
    with pytest.raises(CheckpointError, match=r"buffer 4 → 8.*former values"):
        alone(numbered([5, 5]), shuffle=True, buffer=8).resume(*saved)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(SpecError, match="epoch 0 of the stream has no batch"):
        list(alone(numbered([0, 0])))
    with pytest.raises(SpecError, match="than a step"):
        list(alone(numbered([3]), batch=4, drop_last=True))


def test_lines_are_found_by_their_byte_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": 22}\n{"id": 3}')
    source = TextLines([path], json.loads)
    (name,) = source.shards()
    pairs = list(source.open(name, None))
    assert [sample["id"] for sample, _ in pairs] == [1, 22, 3]
    assert [sample["id"] for sample, _ in source.open(name, pairs[0][1])] == [22, 3]
    path.write_text("{}\n")
    assert source.shards() != [name]
    with pytest.raises(SpecError, match=r"has 3 bytes, and had \d+ when the launch began"):
        next(source.open(name, None))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source.shards()


def test_a_file_that_is_a_shard_is_noticed_if_its_size_changed(tmp_path: Path) -> None:
    """What reads the shard gets its name as the program gave it."""
    path = tmp_path / "a"
    path.write_text("1\n2\n3\n")
    names = [str(path), "no file"]

    def read_lines(name: str) -> list[str]:
        return Path(name).read_text().split() if name == str(path) else []

    class OfFiles(Source):
        def shards(self) -> list[str]:
            return names

        def open(self, shard: str, position: Any) -> Iterator[Any]:
            return zip(read_lines(shard)[position or 0 :], range(1, 9), strict=False)

    makes: list[Callable[[], Source]] = [OfFiles, lambda: Counted(names, read_lines)]
    makes.append(lambda: NodeShards(names, lambda name: nodes.IterableWrapper(read_lines(name))))
    for make in makes:
        path.write_text("1\n2\n3\n")
        loader = alone(make(), batch=1)
        assert next(iter(loader)) == ["1"]
        saved: Any = (loader.facts(), [loader.state_dict()])
        path.write_text("1\n3\n")
        with pytest.raises(CheckpointError, match="its name or size has changed"):
            alone(make(), batch=1).resume(*saved)
    # An earlier checkpoint does not have the sizes of a program's own source.
    old = {**alone(OfFiles(), batch=1).facts(), "digest": digest_of("\0".join(names).encode())}
    assert alone(OfFiles(), batch=1).resume(old, saved[1]) == ""


@pytest.mark.timeout(120)
def test_a_session_saves_and_restores_a_stream(tmp_path: Path) -> None:
    def launch(total: int, source: Source, **more: Any) -> list[Any]:
        model = torch.nn.Linear(1, 1)
        with Session(model, directory=tmp_path / "run", interval=100, **more) as session:
            loader = session.stream(source, 2, collate_fn=list, repeat=True)
            return [batch for _, batch in zip(session.steps(total), loader, strict=False)]

    source = numbered([3, 4, 5])
    begun = launch(4, source)
    whole = iter(alone(source, batch=2, seed=0, repeat=True))
    assert begun + launch(9, source) == [next(whole) for _ in range(9)]
    with pytest.raises(CheckpointError, match="the shards of the stream are not those"):
        launch(12, numbered([3, 4]))
    fresh = iter(alone(source, batch=2, seed=0, repeat=True))
    assert launch(10, source, exclude="extra.stream") == [next(fresh)]


@pytest.mark.timeout(120)
def test_a_loop_over_steps_reports_a_loader_whose_stream_no_checkpoint_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, loader: Any, **given: Any) -> bool:
        layer = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        options: dict[str, Any] = {"interval": 1, "snapshots": "off", **given}
        with Session(layer, optimizer, directory=tmp_path / name, **options) as session:
            made = loader(session) if callable(loader) else loader
            assert [step for step, _ in zip(session.steps(2), made, strict=False)] == [1, 2]
        said = capfd.readouterr()
        return "a DataLoader over the stream" in said.out + said.err

    def loader_of(workers: int) -> Any:
        return DataLoader(Bare(), batch_size=2, num_workers=workers)

    assert [train(f"bare{workers}", iter(loader_of(workers))) for workers in (0, 1)] == [True, True]
    # torchdata's loaders have a state, and an evaluation may read a stream.
    assert not train("stateful", StatefulDataLoader(Bare(), batch_size=2))
    evaluation = iter(loader_of(0))
    assert not train("evaluation", lambda session: session.stream(numbered([9]), 2))
    next(evaluation)
    del evaluation
    # A dataset may keep its own place, which the session saves.
    saved = Kept()
    loader = iter(DataLoader(saved, batch_size=2))
    assert not train("saved", loader, extra={"data": saved})


@pytest.mark.timeout(120)
def test_a_loop_of_the_program_reports_a_loader_with_an_order_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, *, shuffle: bool) -> bool:
        layer = torch.nn.Linear(1, 1)
        data: Any = range(6)
        loader = DataLoader(data, batch_size=2, shuffle=shuffle)
        with Session(layer, directory=tmp_path / name, interval=1) as session:
            for _ in session.epochs(2):
                for _ in loader:
                    session.boundary()
        said = capfd.readouterr()
        return (said.out + said.err).count("a DataLoader in the order of a RandomSampler") == 1

    assert train("shuffled", shuffle=True)
    assert not train("in order", shuffle=False)


def packed(loader: Any) -> Iterator[Any]:
    """Rows of three samples, from batches of five."""
    held: list[Any] = []
    for batch in loader:
        held += batch
        while len(held) >= 3:
            row, held = held[:3], held[3:]
            yield row


def in_part(loader: Any) -> Iterator[Any]:
    return (batch for batch in loader if batch[0][1] % 2 == 0)


def read_by(wrap: Any, folder: Path) -> list[Any]:
    with Session(torch.nn.Linear(1, 1), directory=folder) as session:
        loader = session.stream(numbered([20]), 5, collate_fn=list)
        return list(session.batches(wrap(loader)))


def test_a_batch_of_what_an_earlier_step_has_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="gave a batch without reading the stream"):
        read_by(packed, tmp_path / "packed")
    assert len(read_by(in_part, tmp_path / "in part")) == 2


@pytest.mark.timeout(120)
def test_arguments_of_a_stream_are_checked_before_the_first_step(tmp_path: Path) -> None:
    source = numbered([3, 4, 5])
    with Session(torch.nn.Linear(1, 1), directory=tmp_path / "run", interval=100) as session:
        with pytest.raises(SpecError, match="expected one of them"):
            session.stream(source)
        with pytest.raises(TypeError, match="expected further arguments of"):
            session.stream(source, 2, sampler=None)
        with pytest.raises(TypeError, match="does not name its shards"):
            session.stream(Bare(), 2)
        for wrong in (
            {"prefetch_factor": 2},
            {"timeout": 5.0},
            {"num_workers": 1, "prefetch_factor": 0},
            {"num_workers": 1, "timeout": -1},
            {"num_workers": 1, "multiprocessing_context": "thread"},
        ):
            with pytest.raises(SpecError, match=list(wrong)[-1]):
                session.stream(source, 2, **wrong)
        with pytest.raises(TypeError, match="worker_init_fn=3: expected a function"):
            session.stream(source, 2, num_workers=1, worker_init_fn=3)
        session.stream(source, 2)
        with pytest.raises(CheckpointError, match="expected a name without dots"):
            session.stream(source, 2)
        for _ in session.steps(1):
            with pytest.raises(Exception, match="make streams before the loop begins"):
                session.stream(source, 2, name="late")


def test_a_batch_that_was_looked_for_is_not_counted() -> None:
    whole = flat([list(alone(numbered([5, 4]), batch=2))])
    loader = alone(numbered([5, 4]), batch=2)
    batches = iter(loader)
    given_so_far: list[Any] = []
    while loader.has_next():
        state: Any = (loader.facts(), [loader.state_dict()])
        other = alone(numbered([5, 4]), batch=2)
        other.resume(*state)
        assert flat([[*given_so_far, *other]]) == whole
        given_so_far.append(next(batches))
    assert not loader.has_next()
    assert (loader.epoch, list(batches), loader.epoch) == (0, [], 1)
    assert flat([given_so_far]) == whole


def masked(samples: list[Any]) -> list[float]:
    return [torch.rand(()).item() + random.random() + np.random.rand() for _ in samples]


@pytest.mark.parametrize("buffer", [0, 4])
def test_random_numbers_of_a_collator_are_the_same_after_a_resume(buffer: int) -> None:
    options: dict[str, Any] = {"batch": 2, "shuffle": True, "buffer": buffer, "collate": masked}
    whole = list(alone(numbered([7, 6]), **options))
    loader = alone(numbered([7, 6]), **options)
    begun = [next(iter(loader)) for _ in range(3)]
    saved: Any = (loader.facts(), [loader.state_dict()])
    torch.manual_seed(99)
    random.seed(99)
    other = alone(numbered([7, 6]), **options)
    other.resume(*saved)
    assert begun + list(other) == whole
    assert len({str(batch) for batch in whole}) == len(whole)


def test_a_dataset_of_a_source_gives_all_samples_to_loaders_without_an_adapter() -> None:
    data = StreamDataset(Counted(["a", "b", "c"], lambda name: [name] * 2), transform=str.upper)
    assert list(data) == ["A", "A", "B", "B", "C", "C"]
    with pytest.raises(TypeError, match="pass its source here"):
        source_of(data)
