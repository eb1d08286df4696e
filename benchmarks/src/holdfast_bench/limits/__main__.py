"""`python -m holdfast_bench.limits`: run the benchmark and print the result as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from holdfast.contracts.errors import HoldfastError, PreflightError
from holdfast_bench.limits.runner import MEGABYTE, Plan, run, run_gpu


def main() -> int:
    """Return the exit status: 0 measured, 1 a program failed, 2 this machine cannot run it."""
    # On SIGTERM, still end all started processes and remove all written files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = parse_options()
    plan = Plan(
        directory=options.directory,
        state_bytes=(options.megabytes or (4 if options.quick else 1250)) * MEGABYTE,
        pairs=options.pairs or (1 if options.quick else 7),
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
    parser = argparse.ArgumentParser(prog="python -m holdfast_bench.limits", description=__doc__)
    parser.add_argument("--directory", type=Path, default=default_directory())
    parser.add_argument("--megabytes", type=int, help="total state of all ranks; default: 1250")
    parser.add_argument("--pairs", type=int, help="default: 7")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few megabytes and one pair")
    parser.add_argument("--gpu", action="store_true", help="measure only what concerns GPUs")
    return parser.parse_args()


def default_directory() -> Path:
    """Return `$HOLDFAST_ROOT`, or a directory that is not on a memory file system."""
    return Path(os.environ.get("HOLDFAST_ROOT") or "/var/tmp").expanduser()


if __name__ == "__main__":
    sys.exit(main())
