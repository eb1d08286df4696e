"""Hostile checkpoints are refused with a reason, run no code, and use little memory and time.

A separate program loads them all. It may use one gigabyte more memory than at its start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.faults.hostile import (
    CANARY,
    ENTRY_CASES,
    FILE_CASES,
    METADATA_CASES,
    TRAIN_STATE_CASES,
)

PROGRAM = Path(__file__).with_name("hostile_program.py")
LIMIT_S = 280
REFUSALS = {"DamagedCheckpointError", "KeyMismatchError"}


def test_hostile_checkpoints_are_refused_and_execute_no_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    # These cases are tried without a manifest, and with a forged one that matches.
    assert len(outcomes) == 2 * len(METADATA_CASES | ENTRY_CASES) + len(
        {*(f"file {name}" for name in FILE_CASES), *TRAIN_STATE_CASES}
    )
    accepted = [each for each in outcomes if each["error"] not in REFUSALS]
    assert accepted == []
    assert [each["case"] for each in outcomes if not each["words"]] == []
    assert list(tmp_path.rglob(CANARY)) == []
