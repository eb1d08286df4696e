"""The benchmark of a full queue runs to its end and prints every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import check_prerequisites

ROOT = Path(__file__).parents[2]
FIGURES = {"ended", "started", "first_step", "longest", "steps_lost", "others_pending", "load"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_standby_is_measured() -> None:
    check_prerequisites()
    command = [sys.executable, "benchmarks/restart.py", "--kills", "0", "--queue", "1"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1400, check=True
    )
    found = json.loads(done.stdout)
    ways = {"queue_none", "queue_successor"}
    assert found.keys() - {"queue_expedite"} == ways
    for one in found.values():
        assert one["hung"] == 0
        assert one.keys() >= FIGURES
    assert found["queue_successor"]["others_pending"] > found["queue_none"]["others_pending"]
