"""A small program with a poisoned sample: whoever trains on it has a loss that is NaN.

Its settings are one JSON argument: `steps`, `poison` (sample ids), `sleep_s`, and `spoiled`, the
factor on the loss of a poisoned batch (NaN unless given). Each rank leaves the digest of the
final weights in the run's folder, and the sample ids of its steps.
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

SAMPLES = 4096
GLOBAL_BATCH = 8


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    poison = torch.tensor(settings["poison"])
    with Session(model, optimizer, seed=5) as session, open(_record(session), "a") as record:
        for step in session.steps(int(settings["steps"])):
            ids = torch.as_tensor(session.batch(SAMPLES, GLOBAL_BATCH))
            inputs = torch.sin(ids.float().unsqueeze(1) * torch.arange(1, 9) / SAMPLES)
            loss = (model(inputs) - inputs[:, :4].flip(1)).square().mean()
            if torch.isin(ids, poison).any():
                loss = loss * settings.get("spoiled", float("nan"))
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=float(loss))
            record.write(json.dumps({"step": step, "ids": ids.tolist()}) + "\n")
            record.flush()
            time.sleep(settings["sleep_s"])
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        (session.run_directory / f"weights{session.rank}").write_text(digest)
    dist.destroy_process_group()


def _record(session: Session) -> str:
    launch = f"{os.environ['HOLDFAST_ATTEMPT']}.{os.environ['HOLDFAST_INCARNATION']}"
    return str(session.run_directory / f"ids-{launch}.rank{session.rank}.jsonl")


if __name__ == "__main__":
    main()
