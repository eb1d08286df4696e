"""Loads every hostile checkpoint in one process with limited memory and reports the result.

    python hostile_program.py FOLDER

Standard output gets one JSON line per case: {case, seconds, error, words}.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Beside this file when started by path, as the tests do.
sys.path.append(str(Path(__file__).parents[2]))

from tests.faults.hostile import (
    ENTRY_CASES,
    FILE_CASES,
    METADATA_CASES,
    NAME,
    TRAIN_STATE_CASES,
    Spoil,
    make,
    seal,
    state,
)

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.layout import read_train_state

CASE_S: Final = 30
MEMORY_MARGIN_BYTES: Final = 1 << 30


def load(directory: Path) -> None:
    load_state(directory, {key: value * 0 for key, value in state().items()}, group=None)


def load_train_state(directory: Path) -> None:
    read_train_state(directory, read_manifest(directory))


def main() -> None:
    folder = Path(sys.argv[1])
    origin = folder / NAME
    warnings.simplefilter("ignore")
    make(origin)
    load(origin)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MARGIN_BYTES,) * 2)
    signal.signal(signal.SIGALRM, late)
    for group, cases, act, seals in (
        ("metadata", METADATA_CASES, load, True),
        ("entry", ENTRY_CASES, load, True),
        ("file", FILE_CASES, load, False),
        ("train state", TRAIN_STATE_CASES, load_train_state, False),
    ):
        for name, spoil in cases.items():
            place = folder / f"{group} {name}".replace("/", " ").replace(".", "_")
            # Once without a manifest, as stock DCP writes it, and once with a matching one.
            for sealed in (False, True) if seals else (False,):
                what = f"{group}: {name}{', sealed' if sealed else ''}"
                report(what, place / str(sealed) / NAME, origin, spoil, act, sealed)


def report(
    what: str,
    directory: Path,
    origin: Path,
    spoil: Spoil,
    act: Callable[[Path], object],
    sealed: bool,
) -> None:
    """Damage a copy, load it, and print what happened."""
    shutil.copytree(origin, directory)
    spoil(directory)
    if sealed:
        seal(directory)
    began = time.monotonic()
    error: BaseException | None = None
    signal.alarm(CASE_S)
    try:
        act(directory)
    except BaseException as problem:
        # The test judges every kind of exception, timeouts and exits included.
        error = problem
    signal.alarm(0)
    facts = {
        "case": what,
        "seconds": time.monotonic() - began,
        "error": type(error).__name__,
        "words": str(error),
    }
    print(json.dumps(facts), flush=True)
    shutil.rmtree(directory)


def late(number: int, frame: object) -> None:
    raise TimeoutError(f"not within {CASE_S} s")


if __name__ == "__main__":
    main()
