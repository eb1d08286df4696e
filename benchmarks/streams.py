"""Cost of a stream's state: its size, the time to save it, and the time of a resume, by position.

Run `python -m benchmarks.streams` in the checkout. Each source has two shards of 120,000 samples,
so all positions are in the first. Times are CPU times of this process, without loader workers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.unit.test_streams import alone
from torch.utils.data import IterableDataset

from holdfast.trainer.state import plain
from holdfast.trainer.streams import Counted, MdsShards, NodeShards, TarShards, TextLines
from holdfast.trainer.streams.convert import as_source

SHARDS, SAMPLES, BATCH = 2, 120_000, 100
POSITIONS: Final = (1_000, 100_000)
REPEATS: Final = 20


class Arrays(IterableDataset[int]):
    """A dataset that names its shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SHARDS * SAMPLES))

    def shards(self) -> list[str]:
        return [str(shard) for shard in range(SHARDS)]

    def open(self, shard: str, position: int | None) -> Iterator[tuple[int, int]]:
        for number in range(position or 0, SAMPLES):
            yield number, number + 1


def write_data(folder: Path) -> None:
    """Write files of lines, tars and MDS files."""
    rows = []
    for shard in range(SHARDS):
        lines = [f'{{"id": {number}}}\n'.encode() for number in range(SAMPLES)]
        (folder / f"{shard}.jsonl").write_bytes(b"".join(lines))
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, line in enumerate(lines):
                member = tarfile.TarInfo(f"{number:06d}.json")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line))
        begin = 4 * (SAMPLES + 2)
        table = np.array([SAMPLES, *range(begin, begin + 8 * SAMPLES + 1, 8)], np.uint32)
        content = table.tobytes() + np.arange(SAMPLES, dtype=np.int64).tobytes()
        (folder / f"{shard}.mds").write_bytes(content)
        columns = {"column_names": ["id"], "column_encodings": ["int"], "column_sizes": [8]}
        file = {"basename": f"{shard}.mds", "bytes": len(content)}
        rows.append({"format": "mds", "version": 2, "samples": SAMPLES, "raw_data": file} | columns)
    (folder / "index.json").write_text(json.dumps({"shards": rows}))


def sources(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return a maker of each source."""
    import datasets
    import webdataset
    from torchdata import nodes

    lines = sorted(map(str, folder.glob("*.jsonl")))
    tars = sorted(map(str, folder.glob("*.tar")))
    options: Any = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}

    def mapped() -> Any:
        found: Any = datasets.load_dataset("json", data_files=lines, **options)
        return found.map(dict).filter(bool)

    return {
        "TextLines": lambda: TextLines(lines),
        "MdsShards": lambda: MdsShards(folder),
        "TarShards": lambda: TarShards(tars),
        "webdataset": lambda: webdataset.WebDataset(tars, shardshuffle=False).decode(),
        "datasets, JSON, map, filter": mapped,
        "NodeShards": lambda: NodeShards(["0", "1"], lambda _: nodes.IterableWrapper(Counting())),
        "IterableDataset": Arrays,
        "Counted": lambda: Counted(["0", "1"], lambda _: range(SAMPLES)),
    }


class Counting:
    """An iterable with a state, for a node."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def measure(make: Callable[[], Any], position: int, **options: Any) -> tuple[int, float, float]:
    """Return the bytes of the state, and the milliseconds of a save and of a resume."""

    def loader() -> Any:
        return alone(as_source(make()), batch=BATCH, **options)

    read = loader()
    for _ in islice(iter(read), position // BATCH):
        pass
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        row = plain.to_bytes(read.state_dict(), "row")
        times.append(time.process_time() - began)
    resumes = []
    for _ in range(3):
        again = loader()
        began = time.process_time()
        again.resume(read.facts(), [plain.from_bytes(row)])
        next(iter(again))
        resumes.append(time.process_time() - began)
    return len(row), statistics.median(times) * 1e3, min(resumes) * 1e3


def main() -> None:
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        print("| source | state | save | resume after 1,000 | resume after 100,000 |")
        for kind, make in sources(Path(name)).items():
            for options in ({}, {"shuffle": True, "buffer": 1000}):
                if chosen and kind not in chosen:
                    continue
                with contextlib.redirect_stderr(io.StringIO()):
                    near, far = (measure(make, position, **options) for position in POSITIONS)
                title = f"{kind}{', shuffled' * bool(options)}"
                print(f"| {title} | {far[0]} B | {far[1]:.2f} ms | {near[2]:.1f} ms | ", end="")
                print(f"{far[2]:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
