"""`holdfast simulate --history-days`: the past of a real cluster is a trace of free GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import wait_until

from holdfast.contracts.spec.resources import Resources
from holdfast.workers.schedulers.cluster_history import read_history

DAYS = 0.01
SPEC = """
name = "history"
command = ["train.py"]
config = { steps = 100 }
[resources]
executor = "slurm"
partition = "spot"
gpus_per_node = 2
"""


@pytest.mark.slow
def test_jobs_and_drained_nodes_of_a_cluster_become_a_trace(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    began = time.time()
    for _ in range(2):  # one after the other on the same GPUs
        slurm.run("sbatch", "-W", "-pspot", "-wn1", "--gres=gpu:2", "-o/dev/null", "--wrap=sleep 3")
    slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        time.sleep(3.0)
    finally:
        slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    wait_until(lambda: _last_event(slurm)[:1] == ["n4"], "slurmdbd's record of the drain")
    now = time.time()
    trace = read_history(Resources(executor="slurm", partition="spot"), DAYS, now=now)
    assert trace.gap_s == 1.0
    since = trace.gpus[-int(now - began) :]
    seen = [free for free, _ in groupby(since) if free != 16]
    # Slurm may start the second job in the second in which the first ends.
    assert seen in ([14, 12], [14, 14, 12])

    (tmp_path / "spec.toml").write_text(SPEC)
    asked = ["simulate", str(tmp_path / "spec.toml"), "--history-days", str(DAYS), "--json"]
    played = json.loads(_holdfast(*asked, "--cost", "step_s=1"))
    (row,) = played["rows"]
    assert played["trace_s"] == 864.0
    assert row["gpus"] == 2
    assert row["is_complete"]


def _last_event(slurm: SlurmCluster) -> list[str]:
    """Return the node, the start and the end of the newest event that is over, or nothing."""
    lines = slurm.run(
        "sacctmgr", "-nP", "show", "event", "format=NodeName,TimeStart,TimeEnd", "nodes=n4"
    ).splitlines()
    over = [line.split("|") for line in lines if not line.endswith("Unknown")]
    return max(over, key=lambda words: words[1], default=[])


def _holdfast(*words: str) -> str:
    command = [str(Path(sys.executable).with_name("holdfast")), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
