"""Captures endings: `python -m tests.endings.capture [--only NAME …] [--into FOLDER]`.

Run it from the checkout. A real program produces each ending, and Holdfast's observations are
written to `captured/`. Endings that fill a disk or the memory need root; endings of jobs start a
Slurm cluster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.endings.crashes import capture_crash
from tests.endings.endings import CRASHES, EVERY, JOBS
from tests.endings.hangs import HANGS, HANGS_FOLDER, capture_hang
from tests.endings.jobs import capture_jobs
from tests.endings.records import FOLDER, write_record
from tests.endings.variants import VARIANTS, VARIANTS_FOLDER


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    known = {ending.name for ending in (*EVERY, *VARIANTS) if ending.is_confirmed}
    known |= {hang.name for hang in HANGS}
    if unknown := set(options.only) - known:
        parser.error(f"{', '.join(sorted(unknown))}: no such ending; known: {sorted(known)}")
    wanted = set(options.only) or known
    for crash in CRASHES:
        if crash.name in wanted:
            inputs, private = capture_crash(crash)
            _keep(crash.name, inputs, private, options.into)
    for variant in VARIANTS:
        if variant.name in wanted:
            inputs, private = capture_crash(variant)
            _keep(variant.name, inputs, private, options.into / VARIANTS_FOLDER.name)
    for hang in HANGS:
        if hang.name in wanted:
            print(capture_hang(hang, options.into / HANGS_FOLDER.name), flush=True)
    for name, inputs, private in capture_jobs([job for job in JOBS if job.name in wanted]):
        _keep(name, inputs, private, options.into)


def _keep(name: str, inputs: dict[str, Any], private: dict[str, str], folder: Path) -> None:
    print(write_record(name, inputs, private=private, folder=folder), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
