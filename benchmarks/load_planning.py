"""The cost of planning a load at a size that no test cluster has, from a played `.metadata`.

    python -m benchmarks.load_planning --ranks 8192 --tensors 1220 --json

Run it by hand. It writes the `.metadata` of a checkpoint whose tensors were sharded over `--ranks`
ranks, in a temporary folder. Then one rank of half as many ranks plans its load in a process of its
own: `open_s` to read, verify and parse `.metadata`, `plan_s` to find the byte ranges of its parts,
`peak_bytes` the most memory it used beyond the libraries. `open_cpu_s` and `plan_cpu_s` are the
processor time of these two, which other work on the machine changes less. With `--pickle`, another
process measures `pickle.load` of the same file (`pickle_s`, `pickle_bytes`).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.planning import COLUMNS, RANKS_PER_NODE, ROWS_PER_RANK, content_of, make_blocks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.trainer.format.metadata import METADATA, open_checkpoint
from holdfast.trainer.loading.node import Address
from holdfast.trainer.loading.reader import prepare
from holdfast.trainer.planning.compare_keys import Selection
from holdfast.trainer.planning.metadata_pickle import MetadataPickle
from holdfast.trainer.planning.ranks import NodeIndex, choose_sources, decide
from holdfast.trainer.ranks.identity import distcp_name

CHILD_S: Final = 1800
NOWHERE: Final = Address(("", "", ""), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--tensors", type=int, default=1220)
    parser.add_argument("--pickle", action="store_true", help="also measure pickle.load")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        manifest = in_child(write, directory, options.ranks, options.tensors)
        facts = in_child(measure, directory, manifest, options.ranks, options.tensors)
        if options.pickle:
            facts |= in_child(measure_pickle, directory)
    facts = {"ranks": options.ranks, "tensors": options.tensors, **facts}
    if options.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))


def write(directory: Path, ranks: int, tensors: int) -> Manifest:
    """Write `.metadata` for tensors that are sharded over all ranks, and return a manifest."""
    blocks, common = make_blocks(ranks, tensors)
    held = list(blocks)
    nodes = [range(at, min(at + RANKS_PER_NODE, ranks)) for at in range(0, ranks, RANKS_PER_NODE)]
    names = (common.block.pattern,), (common.pattern.table,)
    indexes = [NodeIndex({rank: (held[rank],) for rank in node}, *names) for node in nodes]
    contents = [content_of(blocks, common, wants) for wants in choose_sources(indexes)]
    plan = decide(indexes, contents)
    made = MetadataPickle(plan, distcp_name)
    content = memoryview(bytearray(made.bytes))
    made.write_to(content)
    (directory / METADATA).write_bytes(content)
    checksum = FileChecksum(made.bytes)
    checksum.update(content)
    files = [FileEntry.of(METADATA, made.bytes, checksum)]
    sizes = plan.file_bytes.tolist()
    files += [
        FileEntry(path=distcp_name(rank), bytes=size, checksum="0")
        for rank, size in enumerate(sizes)
    ]
    for entry in files[1:]:
        with open(directory / entry.path, "wb") as stream:
            stream.truncate(entry.bytes)
    name = str(CheckpointName(1, 1, 1))
    return Manifest(
        run_uid="0", run="played", name=name, step=1, attempt=1, launch=1,
        world_size=ranks, files=tuple(files), committed_at=0.0,
    )  # fmt: skip


def measure(directory: Path, manifest: Manifest, ranks: int, tensors: int) -> dict[str, Any]:
    """Measure how the middle rank of half as many ranks plans its load."""
    wanted = max(1, ranks // 2)
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=wanted // 2, world_size=wanted
    )
    mesh = DeviceMesh("cpu", list(range(wanted)), _init_backend=False)
    shape = torch.Size((ROWS_PER_RANK * ranks, COLUMNS))
    layers = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.zeros(ROWS_PER_RANK * ranks // wanted, COLUMNS),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=(COLUMNS, 1),
        )
        for number in range(tensors)
    }
    gc.collect()
    before = peak_bytes()
    gc.disable()
    began, busy = time.perf_counter(), time.process_time()
    opened = open_checkpoint(directory, manifest, is_lean=True)
    open_s, open_cpu_s = time.perf_counter() - began, time.process_time() - busy
    began, busy = time.perf_counter(), time.process_time()
    ready = prepare(opened, {"model": layers}, Selection(), NOWHERE)
    plan_s, plan_cpu_s = time.perf_counter() - began, time.process_time() - busy
    return {
        "boxes": ranks * tensors,
        "metadata_bytes": manifest.files[0].bytes,
        "open_s": round(open_s, 3),
        "plan_s": round(plan_s, 3),
        "open_cpu_s": round(open_cpu_s, 3),
        "plan_cpu_s": round(plan_cpu_s, 3),
        "peak_bytes": peak_bytes() - before,
        "wanted_bytes": sum(want.series.bytes for want in ready.wants.items),
    }


def measure_pickle(directory: Path) -> dict[str, Any]:
    """Measure Python's own unpickler, with the garbage collector off."""
    gc.disable()
    before, began = peak_bytes(), time.perf_counter()
    with open(directory / METADATA, "rb") as stream:
        kept = pickle.load(stream)
    seconds = round(time.perf_counter() - began, 3)
    assert kept.storage_data
    return {"pickle_s": seconds, "pickle_bytes": peak_bytes() - before}


def peak_bytes() -> int:
    """Return the most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_child(act: Callable[..., Any], *given: Any) -> Any:
    """Return the result of `act` in a new process, whose memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(act, given).get(CHILD_S)


if __name__ == "__main__":
    main()
