"""The one-machine test cluster behaves like real Slurm where Holdfast depends on it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_config import ClusterPaths, ClusterSpec, parse_version
from slurm_daemons import wait_until
from slurm_errors import ClusterStateError

WAIT_S = 90.0
CLUSTER_PY = Path(__file__).parents[2] / "infra" / "slurm" / "cluster.py"
# Writes the time of a TERM signal to the file $1, then exits with 0, or stays if $2 is `stay`.
ON_TERM = """
trap 'date +%s.%N >> "$1"; test "$2" = stay || exit 0' TERM
echo up > "$1.up"
for _ in $(seq 600); do sleep 0.1; done
"""
# A process outside of its step's session and process tree, like a daemon.
DETACHED = 'setsid sleep 600 & echo $! > "$1"; wait'


def submit(cluster: SlurmCluster, folder: Path, *options: str, script: str) -> str:
    """Submit a batch script; returns its job id."""
    path = folder / f"job-{time.monotonic_ns()}.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    output = f"--output={folder}/%j.out"
    return cluster.run("sbatch", "--parsable", "--no-requeue", output, *options, str(path)).strip()


def submit_on_term(cluster: SlurmCluster, folder: Path, node: str, mark: Path, word: str) -> str:
    """Submit a spot job that fills `node` and runs ON_TERM as a step; returns its id."""
    code = folder / "on_term.sh"
    code.write_text(ON_TERM)
    return submit(
        cluster, folder, "-p", "spot", "-w", node, "--gpus-per-node=4",
        script=f"srun bash {code} {mark} {word}",
    )  # fmt: skip


def read_field(cluster: SlurmCluster, job: str, field: str) -> str:
    """One field of `scontrol show job`."""
    found = re.search(rf"\b{field}=(\S*)", cluster.run("scontrol", "show", "job", job))
    assert found, f"scontrol shows no {field}"
    return found[1]


def wait_for_account(cluster: SlurmCluster, job: str, state: str) -> None:
    """Wait until sacct reports the state ("CANCELLED by 0" counts as CANCELLED)."""

    def words() -> list[str]:
        return cluster.run("sacct", "-X", "-n", "-j", job, "-o", "state%30").split()

    reached = wait_until(lambda: words()[:1] == [state], WAIT_S)
    assert reached, f"job {job} is {words()} after {WAIT_S:.0f} s, not {state}"


def mentions(directory: Path) -> list[str]:
    """Command lines of all processes whose command or environment names `directory`."""
    text = os.fsencode(directory)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if text in command or text in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {command.decode(errors='replace')}")
        except OSError:
            continue  # It ended meanwhile.
    return found


def test_four_nodes_are_idle_with_four_gpus_each(slurm: SlurmCluster) -> None:
    lines = slurm.run("sinfo", "-h", "-N", "-p", "spot", "-o", "%N %T %G").splitlines()
    assert lines == [f"n{number} idle gpu:4" for number in (1, 2, 3, 4)]
    partitions = slurm.run("scontrol", "show", "partition")
    assert "GraceTime=10" in partitions
    assert "PriorityTier=10" in partitions


def test_each_job_sees_its_own_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = "srun bash -c 'echo $CUDA_VISIBLE_DEVICES > %s'; sleep 5"
    jobs = [
        submit(slurm, tmp_path, "-w", "n1", "--gpus-per-node=2", script=script % (tmp_path / name))
        for name in ("first", "second")
    ]
    files = [tmp_path / "first", tmp_path / "second"]
    assert wait_until(lambda: all(f.exists() and f.read_text() for f in files), WAIT_S)
    assert sorted(file.read_text().strip() for file in files) == ["0,1", "2,3"]
    slurm.run("scancel", *jobs)


@pytest.mark.slow
def test_prod_preempts_spot_with_notice(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A preempted job has a PreemptTime. If it exits by itself, versions differ in its state."""
    version = parse_version(slurm.run("scontrol", "--version"))
    marks = {"leave": tmp_path / "leave", "stay": tmp_path / "stay"}
    leaver = submit_on_term(slurm, tmp_path, "n1", marks["leave"], "leave")
    stayer = submit_on_term(slurm, tmp_path, "n2", marks["stay"], "stay")
    assert wait_until(lambda: all(Path(f"{m}.up").exists() for m in marks.values()), WAIT_S)
    assert read_field(slurm, leaver, "PreemptTime") == "None"
    submitted_s = time.time()
    prods = [
        submit(slurm, tmp_path, "-p", "prod", "-w", node, "--gpus-per-node=4", script="true")
        for node in ("n1", "n2")
    ]
    # The file exists a moment before its first line is written.
    assert wait_until(lambda: all(m.exists() and m.read_text() for m in marks.values()), WAIT_S)
    for mark in marks.values():
        notice_s = float(mark.read_text().split()[0]) - submitted_s
        assert notice_s < 5, f"TERM came {notice_s:.1f} s after the prod job"
    wait_for_account(slurm, leaver, "COMPLETED" if version < (24, 5) else "PREEMPTED")
    assert read_field(slurm, leaver, "PreemptTime").startswith("20")
    wait_for_account(slurm, stayer, "PREEMPTED")
    for prod in prods:
        wait_for_account(slurm, prod, "COMPLETED")


@pytest.mark.slow
def test_job_of_a_lost_node_fails_and_the_node_can_restart(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm alone; tests of attempts that lose a node run by default."""
    pid_file = tmp_path / "pid"
    job = submit(slurm, tmp_path, "-w", "n3", script=f"srun bash -c '{DETACHED}' - {pid_file}")
    assert wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()), WAIT_S)
    detached = Path(f"/proc/{pid_file.read_text().strip()}/cmdline")
    assert wait_until(lambda: b"sleep" in detached.read_bytes(), WAIT_S)
    assert slurm.kill_node("n3") >= 3
    assert not detached.exists() or not detached.read_bytes()
    wait_for_account(slurm, job, "NODE_FAIL")
    assert slurm.node_states()["n3"].startswith("down")
    slurm.start_node("n3")
    with pytest.raises(ClusterStateError, match="already runs"):
        slurm.start_node("n3")
    back = submit(slurm, tmp_path, "-w", "n3", script="srun true")
    wait_for_account(slurm, back, "COMPLETED")


@pytest.mark.more
def test_cluster_started_by_the_command_line_stops_without_leftovers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A separate cluster beside the shared one, from start to stop."""
    # A short name: munge's socket has to fit into the 108 characters of a Unix address.
    directory = tmp_path_factory.mktemp("c") / "second"

    def call(*words: str) -> str:
        argv = [sys.executable, str(CLUSTER_PY), *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("start", str(directory), "--nodes", "1", "--gpus-per-node", "1")
    assert call("env", str(directory)) == f"export SLURM_CONF={directory}/slurm.conf\n"
    assert "slurmd.n1" in call("status", str(directory))
    cluster = SlurmCluster.open(directory)
    pid_file = tmp_path / "pid"
    submit(cluster, tmp_path, script=f"srun bash -c '{DETACHED}' - {pid_file}")
    assert wait_until(pid_file.exists, WAIT_S)
    assert len(mentions(directory)) > 6
    call("stop", str(directory))
    assert not directory.exists()
    assert mentions(directory) == []
    with pytest.raises(ClusterStateError, match="no cluster in"):
        SlurmCluster.open(directory)


@pytest.mark.more
def test_start_refuses_a_directory_in_use(slurm: SlurmCluster) -> None:
    with pytest.raises(ClusterStateError, match="is not empty"):
        SlurmCluster(slurm.directory).start()
    with pytest.raises(ClusterStateError, match="there are n1, n2, n3, n4"):
        slurm.kill_node("n5")


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/tmp/with blank", "letters"), ("/tmp/50%", "letters"), ("/tmp/" + 66 * "x", "at most 70")],
)
def test_cluster_paths_that_slurm_cannot_use_are_refused(path: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ClusterPaths(Path(path))


def test_cluster_spec_is_validated() -> None:
    with pytest.raises(ValueError, match="nodes is 0; give a number from 1 to 16"):
        ClusterSpec(nodes=0)
