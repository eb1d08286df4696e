"""A program that logs to experiment trackers, and may be killed at a step.

Its settings are one JSON argument: the trackers with their arguments, the total of steps, and the
step after whose log the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.records.reported import report
from holdfast.trainer import Session, trackers

WAIT_S = 60.0


def report_metric(step: int, value: float) -> None:
    """Report a metric of the checkpoint of a step, as another process does meanwhile."""
    run = RunPaths(Path(os.environ["HOLDFAST_ROOT"]) / Path(__file__).stem)
    ends_at = time.monotonic() + WAIT_S
    while not (found := committed_at(run, step)):
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    with JournalWriter(run.journal_of("cli")) as journal:
        report(run, found[-1], {"accuracy": value}, by="ann", journal=journal)


def committed_at(run: RunPaths, step: int) -> list[str]:
    names = [str(name) for name in run.list_checkpoint_names() if name.step == step]
    return [name for name in names if (run.checkpoint(name) / MANIFEST).exists()]


def main() -> None:
    settings = json.loads(sys.argv[1])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, seed=0, interval=4, snapshots="off")
    for name, arguments in settings["trackers"].items():
        session.track(getattr(trackers, name)(**arguments))
    for step in session.steps(settings["steps"]):
        loss = model(torch.ones(2, 4) * step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=float(step))
        if reported := settings.get("reports", {}).get(str(step)):
            report_metric(*reported)
        if step == settings.get("kill_at"):
            # The metrics of this step are on their way, and its state is in no checkpoint.
            while any(sink._queue.qsize() for sink in session._metrics.sinks):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()


if __name__ == "__main__":
    main()
