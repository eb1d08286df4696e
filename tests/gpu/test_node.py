"""What a node's agent observes of GPUs: NVML values, NCCL flight records, causes, free memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.contracts.states import Cause
from holdfast.workers.agent.watch.flight_recorder import recorder_environment, take_flight_record
from holdfast.workers.decisions.causes import RankFailure, classify_crash
from holdfast.workers.nodes.gpus import EVERY_S, watch_gpus

WAIT_S = 120.0
# The share of the device's free memory that a rank of a large model takes.
LARGE_SHARE = 0.8

COLLECTIVES = """
import time, torch, torch.distributed as dist
store = dist.HashStore()
device = torch.device("cuda", 0)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
for _ in range(3):
    dist.all_reduce(torch.ones(4, device="cuda"))
torch.cuda.synchronize()
# The last collective starts and never ends, because a kernel before it never does.
torch.cuda._sleep(1 << 40)
dist.all_reduce(torch.ones(4, device="cuda"))
print("ready", flush=True)
time.sleep(600)
"""

HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(int(free * float(sys.argv[1])), dtype=torch.uint8, device="cuda")
held.fill_(1)
torch.cuda.synchronize()
print(held.numel(), flush=True)
sys.stdin.read()
"""

TOO_MUCH = """
import torch
_, total = torch.cuda.mem_get_info()
torch.empty(2 * total, dtype=torch.uint8, device="cuda")
"""


@contextlib.contextmanager
def running(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program, killed when the context ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.mark.usefixtures("gpu")
def test_nvml_reports_every_gpu() -> None:
    watch = watch_gpus()
    assert watch is not None, "/dev/nvidiactl or nvidia-ml-py is missing"
    give_up = time.monotonic() + 5 * EVERY_S
    while not watch.beats() and time.monotonic() < give_up:
        time.sleep(0.05)
    beats = watch.beats()
    watch.close()
    assert len(beats) >= torch.cuda.device_count()
    for index, beat in enumerate(beats):
        assert beat.index == index
        assert beat.uuid.startswith("GPU-")
        assert beat.memory_total_bytes is not None
        assert beat.memory_used_bytes is not None
        assert 0 <= beat.memory_used_bytes <= beat.memory_total_bytes
        assert beat.utilisation_percent is not None
        assert beat.temperature_c is not None
        assert 0 < beat.temperature_c < 110


@pytest.mark.usefixtures("gpu")
def test_hung_rank_writes_its_flight_record(tmp_path: Path) -> None:
    settings = recorder_environment(tmp_path, {})
    with running(COLLECTIVES, **settings) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
        record = take_flight_record(process.pid, 0, tmp_path)
        assert record is not None
    # Safe to unpickle: torch wrote it in our own child process.
    entries = pickle.loads(record.read_bytes())["entries"]
    names = [entry["profiling_name"] for entry in entries]
    assert names.count("nccl:all_reduce") == 4
    assert entries[-1]["state"] != "completed"


@pytest.mark.usefixtures("gpu")
def test_out_of_gpu_memory_is_classified_as_gpu_oom() -> None:
    command = [sys.executable, "-c", TOO_MUCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    ending, _ = classify_crash([RankFailure(rank=0, exit_code=1, stderr_tail=done.stderr)])
    assert ending.cause is Cause.GPU_OOM, done.stderr


@pytest.mark.usefixtures("gpu")
def test_memory_of_a_killed_rank_is_free_for_the_next_one() -> None:
    """A restart begins once the killed rank is reaped; the driver has freed its memory by then."""
    with running(HOLD, str(LARGE_SHARE)) as former:
        assert former.stdout is not None
        held = int(former.stdout.readline())
        former.send_signal(signal.SIGKILL)
        former.wait(WAIT_S)
        with running(HOLD, str(LARGE_SHARE)) as following:
            assert following.stdout is not None
            again = following.stdout.readline()
            assert again, following.stderr and following.stderr.read()
    assert int(again) > 0.95 * held
