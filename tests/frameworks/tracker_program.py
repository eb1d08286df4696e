"""A program that logs to experiment trackers, and may be killed at a step.

Its settings are one JSON argument: the trackers with their arguments, the total of steps, and the
step after whose log the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from holdfast.trainer import Session, trackers


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
        if step == settings.get("kill_at"):
            # The metrics of this step are on their way, and its state is in no checkpoint.
            while any(sink._queue.qsize() for sink in session._metrics.sinks):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()


if __name__ == "__main__":
    main()
