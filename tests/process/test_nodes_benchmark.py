"""The benchmarks of node 0's lead and of lost nodes run to their end and print every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "join_s",
    "announce_s",
    "agree_s",
    "kill_overhead_s",
    "crash_to_start_s",
    "stop_s",
    "stop_overhead_s",
    "silent_delay_s",
    "lead_cpu",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_benchmark_prints_all_figures_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.nodes", "--members", "8", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=True,
    )
    figures = json.loads(done.stdout)
    assert figures.pop("members") == 8
    assert figures.keys() == FIGURES
    assert all(isinstance(value, float) for value in figures.values())
    # The flush of the last stop is part of it, and the wait for a secondary failure of a restart.
    assert figures["stop_s"] > 5.0
    assert figures["crash_to_start_s"] > 2.0


@pytest.mark.more
@pytest.mark.timeout(200)
def test_lost_nodes_benchmark_prints_both_ways_to_continue() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.lost_nodes", "--nodes", "8", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert [row["spares"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 <= row["other_s"] < row["quiet_s"] <= row["lead_s"]
        # The members whose lead is alive read nothing.
        assert row["other_reads"][1] == 0
