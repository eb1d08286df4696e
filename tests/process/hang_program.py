"""A small program that hangs, or is slow, as its one JSON argument says.

`hangs` maps a launch to (kind, rank, step). `evals` lists (step, seconds, parts): an evaluation
of that duration after the step, in that many parts. `stalls` lists (step, rank, seconds, kind):
one rank is late for the step. `slow_rank` works `slow_s` longer than its peers in each step. With
`ras`, the ranks play the RAS of NCCL at that port, with that answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import played_ras

from holdfast.trainer import Session


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    if ras := settings.get("ras"):
        port, answer = ras
        serve = (played_ras.listen(port), Path(answer), "answer")
        threading.Thread(target=played_ras.play, args=serve, daemon=True).start()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hang = settings.get("hangs", {}).get(os.environ.get("HOLDFAST_LAUNCH", ""))
    evals = {step: (seconds, parts) for step, seconds, parts in settings.get("evals", ())}
    stalls: dict[tuple[int, int], list[tuple[float, str]]] = {}
    for step, rank, seconds, kind in settings.get("stalls", ()):
        stalls.setdefault((step, rank), []).append((seconds, kind))
    with Session(model, optimizer, seed=1) as session:
        for step in session.steps(int(settings["steps"])):
            if hang and [session.rank, step] == hang[1:]:
                get_stuck(hang[0], model)
            for seconds, stall in stalls.get((step, session.rank), ()):
                be_late(seconds, stall)
            if session.rank == settings.get("slow_rank"):
                time.sleep(settings["slow_s"])
            train(model, optimizer)
            time.sleep(settings["sleep_s"])
            if step in evals:
                with session.phase("eval"):
                    evaluate(*evals[step])
                dist.barrier()
    dist.destroy_process_group()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(seconds: float, parts: int) -> None:
    for _part in range(parts):
        time.sleep(seconds / parts)


def be_late(seconds: float, kind: str) -> None:
    """Delay: sleep, wait for a computing child process, or compute in small parts."""
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "helper":
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", "while True: pass"], timeout=seconds, check=False)
    else:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            torch.ones(64, 64).matmul(torch.ones(64, 64)).sum().item()


def get_stuck(kind: str, model: torch.nn.Module) -> None:
    if kind == "sleep":
        time.sleep(3600)
    while kind == "loop":
        pass
    if kind == "mismatch":
        dist.broadcast(torch.zeros(1000), src=1)
        dist.barrier()


if __name__ == "__main__":
    main()
