"""Pipelines of the package `webdataset`: the samples are the package's, and positions are exact."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from tests.unit.test_streams import alone, check_resumes, flat
from webdataset import filters, shardlists

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.convert import as_source

SIZES = (9, 14, 5, 11)


@pytest.fixture
def urls(tmp_path: Path) -> str:
    """Four tars, as one text with braces."""
    for shard, size in enumerate(SIZES):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(size):
                for suffix in ("cls", "json"):
                    content = str(100 * shard + number).encode()
                    member = tarfile.TarInfo(f"{shard}/{number:03d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return f"{tmp_path}/{{0..3}}.tar"


def noisy(sample: Any) -> Any:
    return {**sample, "noise": random.random()}


def dataset(urls: Any, **more: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": False, **more})


def is_kept(sample: Any) -> bool:
    return bool(sample["json"] % 5)


def unlucky(sample: Any) -> Any:
    if sample["json"] % 5 == 0:
        raise ValueError("no picture")
    return sample


def renamed(name: str) -> str:
    return name.replace(".cls", ".label")


# Each makes a pipeline of one epoch.
KINDS: dict[str, Callable[[str], Any]] = {
    "bytes": dataset,
    "decoded": lambda urls: dataset(urls).decode(),
    "selected": lambda urls: dataset(urls).decode().select(is_kept).to_tuple("cls", "json"),
    "handled": lambda urls: dataset(urls).decode().map(unlucky, handler=wds.ignore_and_continue),
    "files": lambda urls: dataset(
        urls, select_files=lambda name: "json" not in name, rename_files=renamed
    ),
    "pipeline": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.decode(),
        wds.map(lambda sample: sample["json"]),
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_samples_are_those_of_the_package(urls: str, kind: str) -> None:
    theirs = list(KINDS[kind](urls))
    batches = list(alone(as_source(KINDS[kind](urls)), batch=3))
    assert [sample for batch in batches for sample in batch] == theirs
    assert len(theirs) in (sum(SIZES), sum(SIZES) - 9)


@pytest.mark.parametrize("kind", ["decoded", "selected", "handled"])
def test_a_pipeline_continues_at_any_step_to_the_bit(urls: str, kind: str) -> None:
    def pipeline() -> Any:
        if kind != "selected":
            return KINDS[kind](urls).shuffle(4).map(noisy)
        return dataset(urls).shuffle(4).decode().map(noisy).select(is_kept)

    def loader() -> Any:
        source = as_source(pipeline())
        return alone(source, batch=3, transform=lambda sample: (sample["json"], sample["noise"]))

    whole = list(loader())
    assert len({noise for batch in whole for _, noise in batch}) == len(list(pipeline()))
    check_resumes(loader, whole)


def test_shuffles_are_those_of_the_stream(urls: str) -> None:
    def read(given: Any, **more: Any) -> tuple[Any, list[Any]]:
        loader = alone(as_source(given.decode()), transform=lambda x: x["json"], **more)
        return loader.facts(), [x for batch in loader for x in batch]

    plainly, order = read(dataset(urls))
    assert not plainly["shuffle"]
    shards, by_shards = read(dataset(urls, shardshuffle=100))
    assert (shards["shuffle"], shards["buffer"]) == (True, 0)
    assert by_shards != order
    both, in_blocks = read(dataset(urls, shardshuffle=100, detshuffle=True).shuffle(8))
    assert (both["shuffle"], both["buffer"]) == (True, 8)
    assert flat([[by_shards]]) == flat([[in_blocks]]) == flat([[order]])
    own, _ = read(dataset(urls, shardshuffle=100), shuffle=True, buffer=3)
    assert own["buffer"] == 3


def doubled(samples: Iterator[Any]) -> Iterator[Any]:
    for sample in samples:
        yield sample
        yield sample


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one.batched(4), r"with batched.*session\.stream makes the batches"),
        (lambda one: one.slice(4), "with islice of itertools.*steps of one sample"),
        (lambda one: one.compose(doubled), r"with doubled of .*steps of one sample"),
        (lambda one: one.mcached(), "with Cached"),
        (lambda one: one.with_epoch(10), "leave them out, and pass repeat=True"),
        (lambda one: wds.WebLoader(one), "with DataLoader.*give session.stream the dataset"),
        (lambda one: wds.DataPipeline(one.pipeline[0]), "reads no tars"),
        (lambda one: one.compose(filters.pipelinefilter(shardlists.resampled_)()), "resampled"),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused(
    urls: str, change: Callable[[Any], Any], problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        as_source(change(dataset(urls)))


def test_shards_that_cannot_be_read_in_part_are_refused(urls: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is a pipe.*s3://"):
        as_source(dataset("pipe:cat a.tar"))
    with pytest.raises(SpecError, match="draw with replacement"):
        as_source(dataset(urls, resampled=True))
    with pytest.raises(SpecError, match="leave cache_dir out"):
        as_source(dataset(urls, cache_dir=str(tmp_path)))
    with pytest.raises(SpecError, match="name the files"):
        as_source(dataset(f"{tmp_path}/"))
    (tmp_path / "0.tar").write_bytes(b"0" * 2048)
    with pytest.raises(SpecError, match="is not a tar"):
        as_source(dataset(urls)).shards()
    with pytest.raises(TypeError, match=r"expected a webdataset\.WebDataset"):
        as_source(filters.map(noisy))


def test_a_step_that_leaves_out_a_sample_of_a_batch_is_an_error(urls: str) -> None:
    source = as_source(dataset(urls).decode().map(lambda one: one if is_kept(one) else None))
    with pytest.raises(SpecError, match="leave out samples with select"):
        list(alone(source))
