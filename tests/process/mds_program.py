"""Writes shards by MosaicML Streaming and compares what it reads of them with `MdsShards`.

    python mds_program.py FOLDER SAMPLES

Each compression gets a folder. `FOLDER/data` gets shards with the numbers of SAMPLES samples. The
result is JSON: for each compression, the numbers of samples, of equal samples and of shards.
"""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from tests.process.stream_program import import_streaming

from holdfast.trainer.streams import MdsShards

COMPRESSIONS = ("", "br", "bz2", "gz", "snappy", "zstd", "zstd:7")
COLUMNS = {
    "text": "str", "number": "int", "bytes": "bytes", "half": "float16", "json": "json",
    "free": "ndarray", "typed": "ndarray:int16", "fixed": "ndarray:float32:2,3",
    "long": "str_int", "exact": "str_decimal", "small": "uint8", "wide": "float64",
}  # fmt: skip
COUNT = 50


def sample_of(number: int) -> dict[str, Any]:
    return {
        "text": "ü" * number,
        "number": -number,
        "bytes": bytes(range(number)),
        "half": np.float16(number / 4),
        "json": {"n": [number, None]},
        "free": np.arange(number + 1).reshape(1, -1),
        "typed": np.arange(1 + number % 4, dtype=np.int16),
        "fixed": np.full((2, 3), number, np.float32),
        "long": 10**number,
        "exact": Decimal(number) / 4,
        "small": np.uint8(number),
        "wide": np.float64(number / 3),
    }


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, np.ndarray | np.generic):
            return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())


def main() -> None:
    folder, samples = Path(sys.argv[1]), int(sys.argv[2])
    streaming = import_streaming()
    with streaming.MDSWriter(
        out=str(folder / "data"), columns={"id": "int"}, size_limit=240
    ) as out:
        for number in range(samples):
            out.write({"id": number})
    found = {}
    for kind in COMPRESSIONS:
        shards = folder / f"shards {kind}"
        more = {"compression": kind or None, "hashes": ["sha1", "xxh64"], "size_limit": 4096}
        with streaming.MDSWriter(out=str(shards), columns=COLUMNS, **more) as out:
            for number in range(COUNT):
                out.write(sample_of(number))
        ours = MdsShards(shards)
        # Before Streaming unpacks the shards.
        mine = [sample for name in ours.shards() for sample, _ in ours.open(name, None)]
        theirs = streaming.StreamingDataset(local=str(shards), batch_size=1)
        equal = sum(is_equal(a, theirs[number]) for number, a in enumerate(mine))
        found[kind] = [theirs.num_samples, equal, len(ours.shards())]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
