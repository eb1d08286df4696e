"""A program whose ranks each have an environment of their own, as in reinforcement learning.

Its settings are one JSON argument. With `afresh`, another number of ranks begins with new ones.
With `gathered`, the ranks share the two environments of the run, as docs/elastic.md shows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from holdfast.trainer import Session


class Environment:
    """Counts its own steps."""

    def __init__(self, number: int) -> None:
        self.number, self.steps = number, 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["number"] == self.number
        self.steps = state["steps"]


class Environments:
    """This rank's part of all environments, whose state is the same on all ranks."""

    def __init__(self, envs: list[Environment]) -> None:
        self.envs = envs

    def state_dict(self) -> dict[str, Any]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [env.state_dict() for env in self.envs])
        return {"states": [state for part in parts for state in part]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        first = dist.get_rank() * len(self.envs)
        for env, state in zip(self.envs, saved["states"][first:], strict=False):
            env.load_state_dict(state)


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = 2 // dist.get_world_size()
    numbers = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    envs = [Environment(number) for number in numbers]
    environment = envs[-1]
    options: dict[str, Any] = {"per_rank": {"env": environment}}
    if settings.get("gathered"):
        options = {"extra": {"env": Environments(envs)}}
    if settings.get("afresh"):
        options["exclude"] = ["extra.env"]
    with Session(model, optimizer, **options) as session:
        began = environment.steps
        for _ in session.steps(int(settings["steps"])):
            for env in envs:
                env.steps += 1
            optimizer.step()
            if not os.path.exists(settings.get("hurry", "")):
                time.sleep(settings["sleep_s"])
        print(f"the environment took {began} to {environment.steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
