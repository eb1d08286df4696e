"""Streams of `datasets`: each step's state continues at every sample, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
from tests.unit.test_streams import alone, check_resumes, flat, read

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.state import plain
from holdfast.trainer.streams.convert import as_source, why_inexact
from holdfast.trainer.streams.loader import StreamLoader

ROWS, SHARDS = 40, 4


@cache
def table(count: int) -> Any:
    return datasets.Dataset.from_dict({"n": list(range(count))})


def rows(count: int = ROWS) -> Any:
    return table(count).to_iterable_dataset(num_shards=SHARDS)


def same(row: dict[str, Any]) -> dict[str, Any]:
    return dict(row)


def is_kept(row: dict[str, Any]) -> bool:
    return bool(row["n"] % 3)


def mixed(**more: Any) -> Any:
    return datasets.interleave_datasets([rows().map(same), rows().filter(is_kept)], **more)


STEPS: dict[str, Callable[[], Any]] = {
    "plain": rows,
    "map": lambda: rows().map(same),
    "filter": lambda: rows().filter(is_kept),
    "map and filter": lambda: rows().map(same).filter(is_kept).map(same),
    "batched map": lambda: rows().map(same, batched=True, batch_size=3),
    "shuffle": lambda: rows().map(same).shuffle(seed=1, buffer_size=8),
    "interleave": mixed,
    "interleave at random": lambda: mixed(probabilities=[0.3, 0.7], seed=4),
    "interleave until all end": lambda: mixed(stopping_strategy="all_exhausted"),
    "concatenate": lambda: datasets.concatenate_datasets([rows().map(same), rows()]),
    "take and skip": lambda: rows().skip(3).take(21),
    "numpy": lambda: rows().map(same).with_format("numpy"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_each_shard_continues_at_every_sample(kind: str) -> None:
    source = as_source(STEPS[kind]())
    for name in source.shards():
        whole, places = [], []
        for sample, place in source.open(name, None):
            whole.append(int(sample["n"]))
            place = place() if callable(place) else place
            places.append(plain.from_bytes(plain.to_bytes(place, "place")))
        for at, place in enumerate(places, 1):
            rest = [int(one["n"]) for one, _ in as_source(STEPS[kind]()).open(name, place)]
            assert whole[:at] + rest == whole, (name, at)


@pytest.mark.parametrize("kind", ["map and filter", "shuffle", "interleave at random"])
def test_a_stream_continues_after_five_resumes_and_at_other_sizes(kind: str) -> None:
    def number(row: dict[str, Any]) -> int:
        return int(row["n"])

    more: Any = {"batch": 3, "transform": number, "open_shards": 2, "num_workers": 2}
    whole = list(alone(as_source(STEPS[kind]()), **more))
    given: list[Any] = []
    saved: Any = None
    for steps in (1, 1, 2, 1, 1, 100):
        loader = alone(as_source(STEPS[kind]()), **more)
        if saved is not None:
            assert loader.resume(*saved) == ""
        given += [batch for _, batch in zip(range(steps), loader, strict=False)]
        saved = loader.facts(), [loader.state_dict()]
    assert given == whole
    del more["num_workers"]
    two, rest = read(as_source(STEPS[kind]()), 2, steps=2, **more)
    three, _ = read(as_source(STEPS[kind]()), 3, saved=rest, **more)
    assert flat(two + three) == flat([whole])


def read_in_random_order(files: list[str]) -> Iterator[dict[str, Any]]:
    for name in files:
        order = list(range(11))
        random.shuffle(order)
        yield from ({"n": int(name) + number, "x": random.random()} for number in order)


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "y": random.random()}


def test_a_function_that_draws_an_order_gives_the_rest_of_it_after_a_resume() -> None:
    def loader() -> StreamLoader:
        files = {"files": ["100", "200", "300"]}
        made = datasets.IterableDataset.from_generator(read_in_random_order, gen_kwargs=files)
        return alone(as_source(made.map(noisy).filter(is_kept)), batch=2, open_shards=2)

    whole = list(loader())
    numbers = [row["n"] for batch in whole for row in batch]
    expected = [n + k for n in (100, 200, 300) for k in range(11)]
    assert sorted(numbers) == [n for n in expected if n % 3]
    check_resumes(loader, whole, every=4)


def test_steps_that_an_old_version_loses_samples_after_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "shuffle buffer" in why_inexact(STEPS["shuffle"]())
    assert why_inexact(STEPS["map and filter"]()) == ""
    monkeypatch.setattr(datasets, "__version__", "5.0.0")
    for kind in ("map", "filter", "interleave", "batched map"):
        with pytest.raises(SpecError, match=r"datasets 5\.0\.0 loses samples .* 5\.1 or newer"):
            as_source(STEPS[kind]())
    assert as_source(rows().shuffle(seed=1, buffer_size=8)).shards()
    assert "shuffle buffer" in why_inexact(rows().shuffle(seed=1))


def paths(*names: str) -> Any:
    """Return a stream whose shards are named by paths, as generators get them."""

    def read(files: list[Path]) -> Iterator[dict[str, int]]:
        yield from ({"n": len(one.name)} for one in files)

    return datasets.IterableDataset.from_generator(read, gen_kwargs={"files": [*map(Path, names)]})


def at_random(share: float, seed: int) -> Any:
    return mixed(probabilities=[share, 1 - share], seed=seed)


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "rows": (rows, lambda: rows(ROWS + SHARDS)),
    "order": (lambda: rows().shuffle(seed=1), lambda: rows().shuffle(seed=2)),
    "paths": (lambda: paths("a", "b"), lambda: paths("a", "c")),
    "take": (lambda: rows().take(9), lambda: rows().take(8)),
    "batch": (lambda: rows().batch(2), lambda: rows().batch(3)),
    "shares": (lambda: at_random(0.3, 4), lambda: at_random(0.4, 4)),
    "seed": (lambda: at_random(0.3, 4), lambda: at_random(0.3, 5)),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_stream_that_changed_between_two_launches_is_refused(kind: str) -> None:
    before, after = CHANGED[kind]
    assert as_source(before()).shards() == as_source(before()).shards()
    loader = alone(as_source(before()), collate=str)
    next(iter(loader))
    with pytest.raises(CheckpointError, match="or a step that gives its samples"):
        alone(as_source(after()), collate=str).resume(loader.facts(), [loader.state_dict()])


@pytest.mark.parametrize(
    "made",
    [
        lambda: rows().shuffle(),
        lambda: rows().shuffle().map(same),
        lambda: mixed(probabilities=[0.3, 0.7]),
    ],
    ids=["shuffle", "shuffle and map", "interleave"],
)
def test_a_stream_in_another_order_at_each_launch_is_refused(made: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match=r"has no seed.*shuffle\(seed=0\)"):
        as_source(made())


def test_the_order_of_a_single_shard_needs_no_seed() -> None:
    names = [as_source(paths("a").shuffle(buffer_size=4)).shards() for _ in range(2)]
    assert names[0] == names[1]
