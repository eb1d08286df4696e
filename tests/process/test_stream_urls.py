"""Shards in an object store: read in part, also in loader workers that are forked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.object_store import BUCKET, object_store
from tests.unit.test_streams import alone

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams import TarShards

SIZES = (9, 14, 5)

pytestmark = [pytest.mark.timeout(300), pytest.mark.more]


def tar_of(shard: int, size: int) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(size):
            tar.addfile(tarfile.TarInfo(f"{shard}-{number}.txt"))
    return content.getvalue()


def key_of(sample: Any) -> Any:
    return sample["__key__"]


def test_tars_of_an_object_store_continue_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    with object_store(tmp_path) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name.replace("HOLDFAST_S3_ENDPOINT", "AWS_ENDPOINT_URL"), value)
        files = s3fs.S3FileSystem()
        urls = [f"s3://{BUCKET}/{shard}.tar" for shard in range(len(SIZES))]
        for shard, url in enumerate(urls):
            files.pipe(url, tar_of(shard, SIZES[shard]))

        def loader(workers: int) -> Any:
            return alone(TarShards(urls), batch=3, num_workers=workers, transform=key_of)

        for workers in (0, 2):
            whole = list(loader(workers))
            assert len({key for batch in whole for key in batch}) == sum(SIZES)
            begun = loader(workers)
            given = [batch for _, batch in zip(range(4), begun, strict=False)]
            resumed = loader(workers)
            assert resumed.resume(begun.facts(), [begun.state_dict()]) == ""
            assert given + list(resumed) == whole
        source = TarShards(urls)
        name = source.shards()[1]
        files.pipe(urls[1], tar_of(1, 40))
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(SpecError, match="when the launch began"):
            list(source.open(name, None))
