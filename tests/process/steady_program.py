"""A single-process program that measures a session's cost: many steps without saves, or many saves.

    python steady_program.py steps FOLDER COUNT
    python steady_program.py saves FOLDER COUNT

The steps run between two accesses to files that do not exist, as marks for a tracer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from holdfast.trainer import Session

BEGIN, END = "/nowhere/begin", "/nowhere/end"
WARM_UP = 50
# Threads that run beside the first steps: they allocate the slots and build `.metadata`.
BESIDE = ("holdfast-map", "holdfast-late")
BESIDE_S = 60.0


def mark(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)


def make_session(folder: str, width: int) -> Session:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Session(model, optimizer, directory=folder, interval=10**9, snapshots="off")


def run_steps(folder: str, count: int) -> dict[str, float]:
    """Memory blocks that `count` step boundaries leave allocated."""
    session = make_session(folder, 8)
    for _ in range(WARM_UP):
        session.boundary()
    for thread in threading.enumerate():
        if thread.name in BESIDE:
            thread.join(BESIDE_S)
    before = sys.getallocatedblocks()
    mark(BEGIN)
    for _ in range(count):
        session.boundary()
    mark(END)
    grown = sys.getallocatedblocks() - before
    session.close()
    return {"blocks": grown, "step": session.step}


def memory_bytes(flusher: psutil.Process) -> int:
    """Resident bytes of this process and of its flusher, the slots counted in both."""
    return psutil.Process().memory_info().rss + flusher.memory_info().rss


def run_saves(folder: str, count: int) -> dict[str, float]:
    """Memory after ten saves, and after `count` more."""
    session = make_session(folder, 1024)
    (flusher,) = psutil.Process().children()
    sizes = []
    for number in range(count + 10):
        session.checkpoint()
        session.boundary()
        session._saver.wait()
        if number + 1 in {10, count + 10}:
            time.sleep(0.5)
            sizes.append(memory_bytes(flusher))
    session.close()
    return {"before": sizes[0], "after": sizes[1], "saves": len(list(Path(folder).glob("c*/s*")))}


if __name__ == "__main__":
    act = {"steps": run_steps, "saves": run_saves}[sys.argv[1]]
    print(json.dumps(act(sys.argv[2], int(sys.argv[3]))))
