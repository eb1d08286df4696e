"""A small program with a poisoned sample: training on it gives a loss that is NaN.

Its settings are one JSON argument: `steps`, `poison` (sample ids), `sleep_s`, and `window`, the
skipped data as [first_step, steps]. Once a file `hurry` exists, steps do not sleep. At its end it
trains a second model without a session and with that window from the start, and each rank writes
the digests of both models' weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from holdfast.trainer import Session
from holdfast.trainer.data.order import DataOrder, SkipWindow

SAMPLES = 4096
GLOBAL_BATCH = 8
SEED = 5


class Trained:
    """One model, trained step by step on sample ids."""

    def __init__(self, poison: list[int]) -> None:
        torch.manual_seed(0)
        linear = torch.nn.Linear
        self.model = torch.nn.Sequential(linear(8, 16), torch.nn.GELU(), linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._poison = torch.tensor(poison)

    def step(self, ids: torch.Tensor) -> float:
        """One optimizer step with the mean gradients of all ranks; this rank's own loss."""
        inputs = torch.sin(ids.float().unsqueeze(1) * torch.arange(1, 9) / SAMPLES)
        loss = (self.model(inputs) - inputs[:, :4].flip(1)).square().mean()
        if torch.isin(ids, self._poison).any():
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return float(loss)

    def digest(self) -> str:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    own = Trained(settings["poison"])
    session = Session(own.model, own.optimizer, seed=SEED)
    try:
        with open(_record(session), "a") as record:
            for step in session.steps(int(settings["steps"])):
                ids = session.batch(SAMPLES, GLOBAL_BATCH)
                session.log(loss=own.step(torch.as_tensor(ids)))
                record.write(json.dumps({"step": step, "ids": ids.tolist()}) + "\n")
                record.flush()
                if not os.path.exists(settings.get("hurry", "")):
                    time.sleep(settings["sleep_s"])
        weights = {"own": own.digest(), "spared": spared(settings, session).digest()}
        path = session.run_directory / f"weights{session.rank}.json"
        path.write_text(json.dumps(weights))
    finally:
        # After a loss that is NaN, this saves nothing.
        session.close()
    dist.destroy_process_group()


def spared(settings: dict[str, list[int]], session: Session) -> Trained:
    """The result of an uninterrupted run with the window from the start."""
    skips = (SkipWindow(*settings["window"]),)
    order = DataOrder(samples=SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, skips=skips)
    other = Trained(settings["poison"])
    for step in range(1, session.step + 1):
        ids = order.rank_ids(step, session.rank, session.world_size)
        other.step(torch.as_tensor(ids))
    return other


def _record(session: Session) -> str:
    launch = f"{os.environ['HOLDFAST_ATTEMPT']}.{os.environ['HOLDFAST_LAUNCH']}"
    return str(session.run_directory / f"ids-{launch}.rank{session.rank}.jsonl")


if __name__ == "__main__":
    main()
