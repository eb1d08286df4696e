"""The session under an agent, and on several nodes without an agent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.node.agreement import StatusPort, agree_on_step
from holdfast.contracts.node.rank_status import Phase, RankStatusTable
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor

PROGRAM = Path(__file__).with_name("session_program.py")
STEPS = 60
WAIT_S = 150.0
SLOW_S = 0.5
FREE_PORT = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def start(
    run: RunPaths,
    env: dict[str, str],
    *torchrun: str,
    wrapper: Sequence[str] = (),
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Start one torchrun of the program, prefixed by `wrapper`; `more` are further settings."""
    settings = {"steps": STEPS, "directory": str(run.directory), "sleep_s": 0.05, **more}
    command = [*wrapper, sys.executable, "-m", "torch.distributed.run", *torchrun]
    # Otherwise torchrun leaves its folder in the machine's temporary directory.
    command += ["--log-dir", str(run.directory.parent / "logs")]
    command += [str(PROGRAM), json.dumps(settings)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return subprocess.Popen(
        command, env=clean | {"OMP_NUM_THREADS": "1"} | env, start_new_session=True
    )


def start_nodes(
    run: RunPaths, env: dict[str, str], wrappers: Sequence[Sequence[str]] = ((), ()), **more: Any
) -> list[subprocess.Popen[bytes]]:
    """Start a torchrun of one rank for each of `wrappers`, all in one job."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    place = ("--master-addr", "localhost", "--master-port", str(port))
    size = ("--nnodes", str(len(wrappers)), "--nproc-per-node", "1")
    return [
        start(run, env, *size, *place, "--node-rank", str(node), wrapper=wrapper, **more)
        for node, wrapper in enumerate(wrappers)
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(WAIT_S)


def steps_of(run: RunPaths, rank: int) -> list[dict[str, Any]]:
    path = run.directory / "records" / f"rank{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if "ids" in line]


def wait_for_step(run: RunPaths, step: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + WAIT_S
    while len(steps_of(run, 0)) < step:
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.02)


def rank_pid(run: RunPaths, rank: int) -> int:
    (path,) = (run.directory / "pids").glob(f"{rank}-*")
    return int(path.name.split("-")[1])


def newest_committed(run: RunPaths) -> int:
    manifests = [read_manifest(path) for path in run.list_checkpoints()]
    return max(manifest.step for manifest in manifests if manifest)


def ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.more
def test_under_an_agent_the_session_ignores_signals_and_obeys_rank_status(
    tmp_path: Path,
) -> None:
    run = RunPaths(tmp_path / "elsewhere" / "gpt")
    attempt = run.attempt(3)
    place = tmp_path / "flusher.address"
    flusher_supervisor = FlusherSupervisor(
        place, node=0, nodes=1, log=attempt.flusher_log(0), run=attempt.directory.parent.parent
    )
    status_table, handle = RankStatusTable.create(2)
    env = {
        "HOLDFAST_RANK_STATUS": f"/proc/{os.getpid()}/fd/{handle}",
        "HOLDFAST_FLUSHER": str(place),
        "HOLDFAST_RUN_DIR": str(run.directory),
        "HOLDFAST_ATTEMPT": "3",
        "HOLDFAST_LAUNCH": "2",
        "HOLDFAST_NODE": "0",
        "HOLDFAST_NODES": "1",
        "HOLDFAST_CHECKPOINT_INTERVAL": "10",
    }
    # As an agent starts torchrun: ignored signals stay ignored in every descendant.
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    ignore_signals()
    try:
        torchrun = ("--nproc-per-node", "2", "--signals-to-handle=SIGQUIT")
        process = start(run, env, *torchrun, *FREE_PORT, slow=[15, SLOW_S])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        wait_for_step(run, 8, process)
        for rank in range(2):
            os.kill(rank_pid(run, rank), signal.SIGTERM)
        wait_for_step(run, 15, process)
        assert status_table.signals == 0
        status_table.announce_stop(None)
        step, _ = agree_on_step([StatusPort(status_table)])
        assert process.wait(WAIT_S) == 0
    finally:
        end(process)
        flusher_supervisor.close(wait=True)
    assert newest_committed(run) == step == status_table.record(1).completed
    assert [record.phase for record in status_table.records()] == [Phase.STOP, Phase.STOP]
    assert len(steps_of(run, 0)) == len(steps_of(run, 1)) == step
    events, _ = read_journal(attempt.rank_journal)
    assert {event.data["attempt"] for event in events} == {3}
    committed = [event.data for event in events if event.kind is EventKind.COMMITTED]
    assert committed[-1]["checkpoint"] == f"step-{step:08d}.a0003.l02"
    assert events[-1].data["has_left"] is True
    status_table.close()
    os.close(handle)


@pytest.mark.more
def test_nodes_without_an_agent_stop_together(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    nodes = start_nodes(run, {"HOLDFAST_CHECKPOINT_INTERVAL": "10"}, slow=[8, SLOW_S])
    try:
        wait_for_step(run, 8, nodes[0])
        os.kill(rank_pid(run, 1), signal.SIGUSR2)
        assert [node.wait(WAIT_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            end(node)
    stopped = len(steps_of(run, 0))
    assert 8 <= stopped < STEPS
    assert len(steps_of(run, 1)) == stopped == newest_committed(run)
    events, _ = read_journal(run.attempt(0).rank_journal)
    kinds = [event.kind for event in events]
    told = next(event for event in events if event.kind is EventKind.SIGNAL)
    assert told.data["name"] == "SIGUSR2"
    assert EventKind.STOP_AGREED in kinds
