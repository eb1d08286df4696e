"""The environment with the package of MosaicML Streaming, and shards that its writer wrote."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SETUP_S: Final = 550
WAIT_S: Final = 240


def environment() -> str:
    """Make the environment if it is not there yet. Return its Python."""
    setup = [str(ROOT / "infra" / "setup" / "layered.sh"), "streaming"]
    subprocess.run(setup, check=True, timeout=SETUP_S)
    return str(ROOT / ".setup" / "streaming" / "bin" / "python")


def write_shards(python: str, folder: Path, samples: int) -> Any:
    """Run `mds_program`, which writes shards into `folder / "data"`. Return what it printed."""
    program = ROOT / "tests" / "process" / "mds_program.py"
    done = subprocess.run(
        [python, program, folder, str(samples)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
