"""Trains with workers of a data loader. Its one JSON argument says how they are started."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from holdfast.trainer import Session


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that take `row_s` to read."""

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(self.row_s)
        return torch.full((8,), float(row))


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Session(model, optimizer, seed=1) as session:
        loader = DataLoader(
            Rows(settings.get("rows_s", {}).get(str(dist.get_rank()), 0.0)),
            batch_sampler=session.sampler(64, 4, settings["steps"]),
            num_workers=1,
            prefetch_factor=1,
            multiprocessing_context=settings["context"],
        )
        for _, rows in zip(session.steps(settings["steps"]), loader, strict=False):
            model(rows).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(settings["sleep_s"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
