"""Trains two epochs of a stream, and records which samples each step got on each rank.

    torchrun stream_program.py SETTINGS

SETTINGS is JSON: `directory`, `data` with the files, `source` and `workers`. `shards` limits the
number of files of lines. With STREAM_STOP_AT or
STREAM_KILL_AT, rank 0 gets a SIGTERM, or all ranks are killed, within that step. With `sleep_s`, a
step sleeps until a file `hurry` exists.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import random
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.stops import hold_until_agreed

from holdfast.trainer import Session
from holdfast.trainer.streams import MdsShards, NodeShards, TarShards, TextLines

EPOCHS, GLOBAL_BATCH = 2, 6
SIZES = (13, 7, 20, 5, 11, 9)
BUFFER = 4


def write_data(folder: Path) -> None:
    """Write one file of JSON lines, one tar and one MDS file for each shard."""
    folder.mkdir()
    rows = [write_mds(folder, shard, size) for shard, size in enumerate(SIZES)]
    (folder / "index.json").write_text(json.dumps({"shards": rows}))
    for shard, size in enumerate(SIZES):
        lines = [json.dumps({"id": 100 * shard + number}) for number in range(size)]
        (folder / f"{shard}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, line in enumerate(lines):
                member = tarfile.TarInfo(f"{number:04d}.json")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line.encode()))


def write_mds(folder: Path, shard: int, size: int) -> dict[str, Any]:
    """Write a shard of MosaicML Streaming's format with the column `id`. Return its row."""
    begin = 4 * (size + 2)
    table = np.array([size, *range(begin, begin + 8 * size + 1, 8)], np.uint32)
    content = table.tobytes() + (100 * shard + np.arange(size, dtype=np.int64)).tobytes()
    (folder / f"{shard}.mds").write_bytes(content)
    columns = {"column_names": ["id"], "column_encodings": ["int"], "column_sizes": [8]}
    file = {"basename": f"{shard}.mds", "bytes": len(content)}
    return {"format": "mds", "version": 2, "samples": size, "raw_data": file, **columns}


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """Add random numbers of the three generators, as an augmentation does."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return {"id": sample["id"], "noise": noise}


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """Read the JSON of a sample of a tar."""
    return noisy(json.loads(sample["json"]))


def identified(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the package `webdataset` decoded."""
    return noisy(sample["json"])


def pipeline_of(path: str) -> Any:
    """Return the nodes that read a file of lines, the first of them ahead."""
    from torchdata import nodes

    lines = Path(path).read_text().splitlines()
    return nodes.Mapper(nodes.Prefetcher(nodes.IterableWrapper(lines), 3), json.loads)


class Noted(torch.utils.data.Dataset[dict[str, Any]]):
    """The samples with an index, whose noise depends on it."""

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"id": number, "noise": random.Random(number).random()}


def stateful_loader(workers: int) -> Any:
    """Return torchdata's loader over its own sampler, with a share of the samples."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    size = dist.get_world_size()
    sampler = StatefulDistributedSampler(Noted(), num_replicas=size, rank=dist.get_rank(), seed=3)
    batch = GLOBAL_BATCH // size
    return StatefulDataLoader(Noted(), batch_size=batch, sampler=sampler, num_workers=workers)


@functools.cache
def import_streaming() -> Any:
    """Return the package of MosaicML Streaming, which imports torchvision for pictures."""
    if torch.version.cuda is None:
        # torchvision on PyPI is built for CUDA, so its operators are missing beside another torch.
        library: Any = torch.library
        library = library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("streaming")


def streaming_dataset(folder: Path, kind: Any = None, **more: Any) -> Any:
    """Return a shuffled `StreamingDataset` over shards that its writer wrote."""
    return (kind or import_streaming().StreamingDataset)(
        **{"local": str(folder), "batch_size": GLOBAL_BATCH // dist.get_world_size()} | more,
        shuffle=True,
        shuffle_block_size=16,
        num_canonical_nodes=2,
    )


def source_of(kind: str, folder: Path, limit: int | None) -> tuple[Any, dict[str, Any]]:
    """Return a source, and arguments that belong to it."""
    paths = sorted(map(str, folder.glob("*.jsonl")))[:limit]
    if kind == "lines":
        lines = TextLines(paths, json.loads)
        return lines, {"transform": noisy, "shuffle": True, "buffer": BUFFER, "open_shards": 2}
    if kind == "mds":
        return MdsShards(folder), {"transform": noisy, "shuffle": True, "buffer": BUFFER}
    if kind == "streaming":
        return streaming_dataset(folder), {"transform": noisy}
    if kind == "remote":
        cache = str(Path(tempfile.gettempdir()) / "cache")
        return streaming_dataset(folder, local=cache, remote=str(folder)), {"transform": noisy}
    if kind == "nodes":
        return NodeShards(paths, pipeline_of), {"transform": noisy, "open_shards": 2}
    tars = sorted(map(str, folder.glob("*.tar")))
    if kind == "tar":
        more = {"shuffle": True, "buffer": BUFFER, "open_shards": 2}
        return TarShards(tars), {"transform": decoded, **more}
    if kind == "webdataset":
        import webdataset

        pipeline = webdataset.WebDataset(tars, shardshuffle=100).shuffle(BUFFER)
        return pipeline.decode().map(identified), {}
    import datasets

    cache = str(folder.with_name("cache"))
    options: dict[str, Any] = {"split": "train", "streaming": True, "cache_dir": cache}
    data: Any = datasets.load_dataset("json", data_files=paths, **options)
    if kind == "filtered":
        return data.map(noisy).filter(lambda one: one["id"] % 5), {"shuffle": True, "buffer": 1}
    return data.shuffle(seed=3, buffer_size=BUFFER).map(noisy), {}


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    workers = settings["workers"]
    # Under an agent, the run has a directory.
    own: dict[str, Any] = {}
    if "STREAM_LAUNCH" in os.environ:
        own["directory"] = settings["directory"]
    is_stream = settings["source"] != "stateful"
    if not is_stream:
        loader: Any = stateful_loader(workers)
        own["per_rank"] = {"loader": loader}
    session = Session(wrapped, optimizer, seed=5, **own)
    if is_stream:
        folder, limit = Path(settings["data"]), settings.get("shards")
        source, options = source_of(settings["source"], folder, limit)
        loader = session.stream(
            source, global_batch=GLOBAL_BATCH, num_workers=workers, name="data", **options
        )
    for epoch in session.epochs(EPOCHS):
        if not is_stream:
            loader.sampler.set_epoch(epoch)
        for number, batch in session.enumerate(loader):
            step = session.step + 1
            features = torch.stack([batch["id"] / 1000, batch["noise"]], dim=1).float()
            loss = (wrapped(features) ** 2).mean()
            loss.backward()
            disturb(step, session.rank)
            optimizer.step()
            optimizer.zero_grad()
            line = {"step": step, "epoch": epoch, "number": number, "world": session.world_size}
            line |= {"ids": batch["id"].tolist(), "noise": batch["noise"].tolist()}
            draws = [random.random(), torch.rand(()).item()]
            note(settings["directory"], session.rank, **line, loss=loss.item(), draws=draws)
            if not os.path.exists(settings.get("hurry", "")):
                time.sleep(settings.get("sleep_s", 0.0))
        if session.should_stop:
            break
    session.close()
    dist.destroy_process_group()


def disturb(step: int, rank: int) -> None:
    """Kill or stop this launch in `step`, if it is asked for."""
    if step == int(os.environ.get("STREAM_KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    stop_at = int(os.environ.get("STREAM_STOP_AT", "0"))
    if step == stop_at > 0:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            hold_until_agreed()
        if dist.is_initialized():
            dist.barrier()


def note(directory: str, rank: int, **line: Any) -> None:
    line["launch"] = int(os.environ.get("STREAM_LAUNCH") or os.environ["HOLDFAST_LAUNCH"])
    with open(Path(directory) / f"samples-{rank}.jsonl", "a") as stream:
        stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
