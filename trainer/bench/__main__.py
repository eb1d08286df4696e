"""`python -m holdfast.trainer.bench`: measure, and print the answer as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from holdfast.contracts.errors import HoldfastError, PreflightError
from holdfast.trainer.bench.runner import MEGABYTE, Plan, run, run_gpu


def main() -> int:
    """Exit status: 0 measured, 1 a program of it failed, 2 it cannot be run here."""
    # Ended from outside, it still ends what it started and removes what it wrote.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = parse_options()
    plan = Plan(
        directory=options.directory,
        state_bytes=options.megabytes * MEGABYTE,
        pairs=options.pairs,
        ranks=options.ranks,
    )
    try:
        measure = run_gpu if options.gpu else run
        found = measure(plan.quick() if options.quick else plan)
    except HoldfastError as error:
        print(f"holdfast bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, PreflightError) else 1
    print(json.dumps(found, indent=1))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.bench", description=__doc__)
    parser.add_argument("--directory", type=Path, default=default_directory())
    parser.add_argument("--megabytes", type=int, default=1250, help="state of all ranks together")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few megabytes, one pair")
    parser.add_argument("--gpu", action="store_true", help="what concerns GPUs, and nothing else")
    return parser.parse_args()


def default_directory() -> Path:
    """`$HOLDFAST_ROOT`, where checkpoints go, else a place that is no memory file system."""
    return Path(os.environ.get("HOLDFAST_ROOT") or "/var/tmp").expanduser()


if __name__ == "__main__":
    sys.exit(main())
