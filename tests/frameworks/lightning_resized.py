"""Runs a program on changing numbers of ranks, and compares the samples of each step.

The other side of the comparison is a full run on the first number of ranks.

    python -m tests.frameworks.lightning_resized PROGRAM KIND '[[2, 1], [1, 4], [2, null]]' FOLDER

PROGRAM is a module of this folder, `lightning_program` or `fabric_program`. Each launch is a number
of ranks and the batch at which it gets SIGTERM, null for the last. Lightning chooses the strategy,
so one rank has no `DistributedSampler` by itself.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.frameworks.lightning_cases import Interruption, has_ended, launch, settings_of


def samples_of(folder: Path) -> dict[str, list[int]]:
    """The sorted samples of each batch, of all ranks together."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for path in folder.glob("notes-*.jsonl"):
        for key, facts in dict(json.loads(line) for line in path.open()).items():
            if key.startswith("batch "):
                found[key] += facts["ids"]
    return {key: sorted(ids) for key, ids in found.items()}


def run(program: Any, kind: str, launches: list[list[Any]], folder: Path) -> dict[str, list[int]]:
    """Run the launches one after another in `folder`, and return the samples of each batch."""
    folder.mkdir()
    settings = {**settings_of(kind, folder, 1000), "trainer": {"strategy": "auto"}}
    for number, (ranks, at) in enumerate(launches):
        taken = folder / f"launch-{number}"
        taken.mkdir()
        mark = Interruption(taken, "term", "batch", at)
        codes = launch(program, ranks, settings, mark)
        assert codes == [0] * ranks, (number, codes)
        assert has_ended(folder) == (at is None), f"launch {number} ended at another batch"
    return samples_of(folder)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    program = importlib.import_module(f"tests.frameworks.{sys.argv[1]}")
    kind, launches, folder = sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4])
    expected = run(program, kind, [[launches[0][0], None]], folder / "full")
    found = run(program, kind, launches, folder / "resized")
    different = {
        key: (expected.get(key), found.get(key))
        for key in expected.keys() | found.keys()
        if expected.get(key) != found.get(key)
    }
    assert not different, different
    print(f"{len(found)} batches equal")


if __name__ == "__main__":
    main()
