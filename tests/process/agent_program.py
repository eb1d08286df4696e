"""A small program for the agent's tests: one linear layer, trained with a Session.

Its settings are one JSON argument. With `session` false there is no Session: the program only
sleeps, like a program without Holdfast. Once a file `hurry` exists, steps no longer sleep, so that
a test can let the rest of the run finish quickly.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

SAMPLES = 64


def main() -> None:
    settings = json.loads(sys.argv[1])
    if not settings.get("session", True):
        if settings.get("heeds_signals"):
            # As scripts do that save by themselves at a signal.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("without a session", flush=True)
        time.sleep(settings["sleep_s"])
        if settings.get("fail_at") is not None:
            raise RuntimeError("a bad program")
        return
    train(settings)


class Gate:
    """State whose load lasts for as long as a file exists."""

    def __init__(self, path: str) -> None:
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        return {"path": self._path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        while os.path.exists(self._path):
            time.sleep(0.02)


def train(settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from holdfast.trainer import Session

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    # Makes checkpoints large but not the steps slow; its value shows the step of a copy.
    model.register_buffer("padding", torch.zeros(int(settings.get("padding", 0))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    extra = {"gate": Gate(settings["gate"])} if "gate" in settings else None
    with Session(model, optimizer, extra=extra, seed=1) as session:
        for step in session.steps(int(settings["steps"])):
            if step == settings.get("close_at") and os.environ["HOLDFAST_ATTEMPT"] == "1":
                break
            ids = session.batch(SAMPLES, settings.get("batch", 4))
            if step == settings.get("fail_at"):
                raise RuntimeError(f"a bad batch at step {step}")
            if step == settings.get("exit_at") and os.environ["HOLDFAST_ATTEMPT"] == "1":
                # Exit without the session noticing, as `sys.exit` outside of a `with` block does.
                os._exit(0)
            inputs = torch.as_tensor(ids, dtype=torch.float32).unsqueeze(1).expand(-1, 8) / SAMPLES
            if noise := settings.get("noise"):
                # The weights then depend on each random number that was drawn.
                inputs = inputs + noise * torch.randn(inputs.shape)
            loss = model(inputs).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            model.get_buffer("padding").fill_(step)
            if not os.path.exists(settings.get("hurry", "")):
                time.sleep(settings["sleep_s"])
        print(f"rank {os.environ['RANK']} ends after step {session.step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
