"""Cost of a stream's state: its size, the time to save it, and the time of a resume, by position.

    python -m benchmarks.streams [SOURCE]...

Each source has an epoch of 1,000,000 samples in two shards. A resume is the time from the opening
of the dataset to the first batch, less that of a new stream. Nothing has loader workers. In the
environment with MosaicML Streaming (infra/setup/layered.sh), `StreamingDataset` is one of them.
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
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.process.stream_program import import_streaming
from tests.unit.test_streams import Alone, Place, alone, options_of
from torch.utils.data import IterableDataset

from holdfast.trainer.state import plain
from holdfast.trainer.streams import Counted, MdsShards, NodeShards, TarShards, TextLines
from holdfast.trainer.streams.convert import as_source, is_streaming_dataset
from holdfast.trainer.streams.mosaic import StreamingLoader

SHARDS, SAMPLES, BATCH = 2, 500_000, 100
# Parts of the epoch, two of them near the end of a shard.
POSITIONS: Final = (0.01, 0.49, 0.99)
REPEATS, RESUMES = 20, 3
STREAMING, JSON = "StreamingDataset", "datasets, JSON, map, filter"
# Shuffled blocks are the same for all sources. `datasets` reads slowly.
SHUFFLED: Final = ("TextLines", JSON)


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
        file = {"basename": f"{shard}.mds", "bytes": len(content), "hashes": {}}
        plainly: dict[str, Any] = {
            "compression": None,
            "hashes": [],
            "size_limit": len(content),
            "zip_data": None,
        }
        rows.append(
            {"format": "mds", "version": 2, "samples": SAMPLES, "raw_data": file}
            | columns
            | plainly
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": rows}))


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

    found = {} if find_spec("streaming") is None else {STREAMING: lambda: streaming(folder)}
    return found | {
        "TextLines": lambda: TextLines(lines),
        "MdsShards": lambda: MdsShards(folder),
        "TarShards": lambda: TarShards(tars),
        "webdataset": lambda: webdataset.WebDataset(tars, shardshuffle=False).decode(),
        JSON: mapped,
        "NodeShards": lambda: NodeShards(["0", "1"], lambda _: nodes.IterableWrapper(Counting())),
        "IterableDataset": Arrays,
        "Counted": lambda: Counted(["0", "1"], lambda _: range(SAMPLES)),
    }


def streaming(folder: Path) -> Any:
    return import_streaming().StreamingDataset(
        local=str(folder), batch_size=BATCH, shuffle=True, num_canonical_nodes=2
    )


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


def measure(make: Callable[[], Any], **options: Any) -> tuple[int, float, list[float]]:
    """Return the bytes of the largest state, and milliseconds.

    Those are the time of a save, of the opening of a new stream, and what a resume at each position
    takes longer.
    """

    def loader() -> Any:
        made = make()
        if not is_streaming_dataset(made):
            return alone(as_source(made), batch=BATCH, **options)
        chosen = options_of(batch=BATCH)
        return StreamingLoader(made, chosen, parts=1, ranks=Alone(), place=Place())

    def opening(facts: Any = None, row: bytes = b"") -> float:
        began = time.perf_counter()
        made = loader()
        if row:
            made.resume(facts, [plain.from_bytes(row)])
        next(iter(made))
        found = time.perf_counter() - began
        made.close()
        return found * 1e3

    read, done, rows, saves = loader(), 0, [], []
    batches = iter(read)
    for part in POSITIONS:
        until = int(part * SHARDS * SAMPLES) // BATCH
        for _ in islice(batches, until - done):
            pass
        done = until
        for _ in range(REPEATS):
            began = time.process_time()
            row = plain.to_bytes(read.state_dict(), "row")
            saves.append(time.process_time() - began)
        rows.append(row)
    read.close()
    new = min(opening() for _ in range(RESUMES))
    resumed = [min(opening(read.facts(), row) for _ in range(RESUMES)) - new for row in rows]
    return max(map(len, rows)), statistics.median(saves) * 1e3, [new, *resumed]


def main() -> None:
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        parts = " | ".join(f"resume at {part:.0%}" for part in POSITIONS)
        print(f"| source | state | save | new stream | {parts} |")
        for kind, make in sources(Path(name)).items():
            for options in ({}, {"shuffle": True, "buffer": 1000}):
                if (chosen and kind not in chosen) or (options and kind not in SHUFFLED):
                    continue
                with contextlib.redirect_stderr(io.StringIO()):
                    size, save, times = measure(make, **options)
                title = f"{kind}{', shuffled' * bool(options)}"
                opened, *resumed = (f"{one:.0f} ms" for one in times)
                later = " | ".join(f"+{one}" for one in resumed)
                print(f"| {title} | {size} B | {save:.2f} ms | {opened} | {later} |", flush=True)


if __name__ == "__main__":
    main()
