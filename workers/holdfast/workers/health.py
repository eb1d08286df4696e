"""The check `ready`: GPUs, their memory errors and links, free space, and the clock.

`python -m holdfast.workers.health --gpus 8` prints each problem and exits with status 1 if there is
one. It needs `nvidia-smi` only if GPUs are expected.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.plain_text import counted

QUERY_S: Final = 30.0
CLOCK_S_MAX: Final = 60.0
FREE_GB: Final = 1.0
STAGING: Final = "/dev/shm"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.workers.health", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs that the node has")
    parser.add_argument("--free-gb", type=float, default=FREE_GB, help="least free space, in GB")
    parser.add_argument("--free-in", action="append", help="folders that need it")
    parser.add_argument("--shared", help="folder on shared storage, to compare clocks with")
    given = parser.parse_args(arguments)
    found = list(_problems_with_gpus(given.gpus)) if given.gpus else []
    for folder in given.free_in or [STAGING, tempfile.gettempdir()]:
        found += _problems_with_space(folder, given.free_gb)
    if given.shared:
        found += _problems_with_clock(Path(given.shared))
    print("\n".join(found) or "ready")
    return 1 if found else 0


def _problems_with_gpus(expected: int) -> Iterator[str]:
    try:
        answer = _ask(
            "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"
        )
        links = _ask("nvlink", "--status")
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", "") or getattr(error, "stdout", "") or error).strip()
        yield f"nvidia-smi failed: {detail}; expected {counted(expected, 'GPU')}"
        return
    rows = [line.split(",") for line in answer.splitlines() if "," in line]
    if len(rows) < expected:
        yield f"nvidia-smi lists {counted(len(rows), 'GPU')}, expected {expected}"
    for index, errors in rows:
        # GPUs without ECC report "[N/A]".
        if errors.strip().isdecimal() and int(errors) > 0:
            yield f"GPU {index.strip()} has {errors.strip()} uncorrected memory (ECC) errors"
    down = sum("inactive" in line.lower() for line in links.splitlines())
    if down:
        yield f"{down} NVLinks are inactive, by `nvidia-smi nvlink --status`"


def _ask(*words: str) -> str:
    answer = subprocess.run(
        ["nvidia-smi", *words], capture_output=True, text=True, timeout=QUERY_S, check=True
    )
    return answer.stdout


def _problems_with_space(folder: str, least_gb: float) -> Iterator[str]:
    try:
        free_gb = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        yield f"{folder}: {error.strerror}"
        return
    if free_gb < least_gb:
        yield f"{folder} has {free_gb:.2f} GB of free space, expected at least {least_gb:g} GB"


def _problems_with_clock(folder: Path) -> Iterator[str]:
    """Compare this node's clock with that of the file server."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
            file.write(b"x")
            file.flush()
            ahead_s = time.time() - Path(file.name).stat().st_mtime
    except OSError as error:
        yield f"{folder}: cannot be written: {error.strerror}"
        return
    if abs(ahead_s) > CLOCK_S_MAX:
        yield (
            f"this node's clock differs by {ahead_s:.0f} s from that of {folder}, "
            f"expected at most {CLOCK_S_MAX:.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
