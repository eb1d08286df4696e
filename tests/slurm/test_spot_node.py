"""A node that `infra/cloud/spot-node.yaml` starts joins a cluster by itself, with its GPUs."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_cluster import SlurmCluster, pick_free_ports
from slurm_config import ClusterSpec
from slurm_daemons import wait_until

INFRA = Path(__file__).parents[2] / "infra"
LINES = INFRA / "slurm" / "spot-nodes.conf"
NODE = "spot-1"
PARTITION = "instances"
GPUS = 8
UNIT = Path("/lib/systemd/system/slurmd.service")
WAIT_S = 90.0


def cloud_init() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((INFRA / "cloud" / "spot-node.yaml").read_text())
    return found


def file_of(path: str) -> str:
    """The content of a file that the instance gets."""
    (content,) = [one["content"] for one in cloud_init()["write_files"] if one["path"] == path]
    return str(content)


def options() -> list[str]:
    """The words that systemd makes of `$SLURMD_OPTIONS`: it removes two layers of quotes."""
    (line,) = file_of("/etc/default/slurmd").splitlines()
    (assigned,) = shlex.split(line)
    name, _, value = assigned.partition("=")
    assert name == "SLURMD_OPTIONS"
    return shlex.split(value)


@pytest.mark.more
def test_unit_starts_without_a_configuration_file(tmp_path: Path) -> None:
    """Debian's unit with the drop-in has no condition that such a node cannot meet."""
    unit = tmp_path / "slurmd.service"
    shutil.copy(UNIT, unit)
    assert "ConditionPathExists=/etc/slurm/slurm.conf" in unit.read_text(), "Debian's condition"
    folder = tmp_path / "slurmd.service.d"
    folder.mkdir()
    (folder / "spot.conf").write_text(file_of("/etc/systemd/system/slurmd.service.d/spot.conf"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "spot.conf" not in done.stderr, done.stderr
    drop_in = configparser.ConfigParser()
    drop_in.optionxform = str  # type: ignore[assignment,method-assign]
    drop_in.read(folder / "spot.conf")
    assert drop_in["Unit"]["ConditionPathExists"] == ""
    assert drop_in["Service"]["Restart"] == "on-failure"


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster of one node whose controller has the lines of `spot-nodes.conf`."""
    folder = tmp_path_factory.mktemp("c")
    made = SlurmCluster(folder, ClusterSpec(nodes=1, gpus_per_node=GPUS, accounting=False))
    with made:
        (port,) = pick_free_ports(1)
        # The cluster has a partition `spot` already, and this machine's other nodes have the port.
        text = LINES.read_text().replace("PartitionName=spot ", f"PartitionName={PARTITION} ")
        lines = [line for line in text.splitlines() if line and line[0] != "#"]
        with made.paths.gres_conf.open("a") as stream:
            stream.write(f"NodeName={NODE} Name=gpu File={made.paths.devices}/nvidia[0-7]\n")
        made.configure(*lines, f"SlurmdPort={port}")
        yield made


@pytest.fixture
def node(cluster: SlurmCluster, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """slurmd as the instance starts it: it knows the controller's address and the key alone."""
    host, port = cluster.run("scontrol", "show", "config"), ""
    port = next(one.split("=")[1].strip() for one in host.splitlines() if "SlurmctldPort" in one)
    words = options()
    at = words.index("--conf-server") + 1
    assert words[at].endswith(":6817")
    words[at] = f"127.0.0.1:{port}"
    cluster.paths.spool(NODE).mkdir()
    # Without a configuration, slurmd asks the key's daemon at its usual place, and finds no files.
    script = (
        "mkdir -p /run/munge /etc/slurm && mount -t tmpfs none /run/munge && "
        "mount -t tmpfs none /etc/slurm && "
        f"ln -s {cluster.paths.munge_socket} /run/munge/munge.socket.2 && "
        f"exec slurmd -D -N {NODE} {shlex.join(words)}"
    )
    kept = {key: value for key, value in os.environ.items() if key != "SLURM_CONF"}
    with (tmp_path / "slurmd.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script], env=kept, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        shutil.rmtree(cluster.paths.spool(NODE))


@pytest.mark.slow
def test_spot_node_joins_and_runs_a_job_on_its_gpus(
    cluster: SlurmCluster, node: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    def shown() -> str:
        return cluster.run("sinfo", "-h", "-N", "-n", NODE, "-p", PARTITION, "-o", "%N %T %G %b")

    wanted = f"{NODE} idle gpu:{GPUS} spot"
    joined = wait_until(lambda: shown().strip().startswith(wanted), WAIT_S)
    assert joined, f"{shown()!r}\n{(tmp_path / 'slurmd.log').read_text()}"
    assert node.poll() is None
    output = tmp_path / "job.out"
    options = ("-p", PARTITION, "-w", NODE, "--gpus-per-node=4", "-c", "1", "-o", str(output))
    cluster.run("sbatch", "--wait", *options, "--wrap", "echo $CUDA_VISIBLE_DEVICES", timeout_s=90)
    assert output.read_text().split() == ["0,1,2,3"]
