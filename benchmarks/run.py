"""`make bench`: what a save costs, as ratios to this machine's own limits, printed as JSON.

`save_blocked` is the time that training is held ÷ a memcpy of the same bytes; `save_committed` the
time until the manifest is durable ÷ a plain write of the same bytes with one fsync; `first_save`
as `save_blocked`, with the planning that later saves do not need. Absolute times stand beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

RUN_TIMEOUT_S = 600
MEGABYTE = 1_000_000


def main() -> int:
    """Exit status: 0 measured, 1 a run failed (its output is on standard error)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--megabytes", type=int, default=200, help="state of all ranks together")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(os.environ.get("HOLDFAST_ROOT") or "/var/tmp"),
        help="where to write; default: $HOLDFAST_ROOT, else /var/tmp",
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    runs = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as directory:
            try:
                runs.append(measure(ranks, options.megabytes * MEGABYTE, Path(directory)))
            except subprocess.SubprocessError as error:
                print(f"bench with {ranks} ranks: {error}", file=sys.stderr)
                return 1
    print(json.dumps({"machine": machine(options.directory), "runs": runs}, indent=1))
    return 0


def measure(ranks: int, state_bytes: int, directory: Path) -> dict[str, object]:
    """What `spine.py` found with `ranks` ranks; `SubprocessError` when it failed."""
    program = Path(__file__).with_name("spine.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(program)]
    command += ["--directory", str(directory), "--state-bytes", str(state_bytes)]
    done = subprocess.run(
        command,
        # torchrun leaves a folder in the temporary one: here it goes with the rest.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine(directory: Path) -> dict[str, object]:
    """What the figures were measured on, and with."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "directory": str(directory),
        "versions": {name: version(name) for name in ("holdfast", "torch")}
        | {"python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
