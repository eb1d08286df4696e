"""Runs launches of `accelerate_program` one after another, with forked ranks.

    python -m tests.frameworks.accelerate_cases LAUNCHES

LAUNCHES is a JSON list of [ranks, settings]. Ranks are forked, to save the start of Python. Prints
the exit statuses of the ranks of each launch as JSON: 0, a positive status, or a negative signal.

Settings with `script` run that script instead, with `arguments` and `HOLDFAST_ROOT` at `root`. If
`stops` is true, it is stopped by its stop file after its first commit.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.frameworks import accelerate_program
from tests.support.forked_child import start_child

from holdfast.contracts.environment import CHECKPOINT_INTERVAL

LAUNCH_S: Final = 120.0
COMMITS: Final = "*/checkpoints/*/manifest.json"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launches = enumerate(json.loads(sys.argv[1]))
        stores = ((one, Path(folder) / f"store-{number}") for number, one in launches)
        print(json.dumps([run(ranks, settings, store) for (ranks, settings), store in stores]))


def run(ranks: int, settings: dict[str, Any], store: Path) -> list[int]:
    """One launch. If one rank fails, the others are killed, as torchrun does it."""
    pids = [fork(rank, ranks, settings, store) for rank in range(ranks)]
    statuses: dict[int, int] = {}
    give_up = time.monotonic() + LAUNCH_S
    while len(statuses) < ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        if settings.get("stops") and (commits := list(Path(settings["root"]).glob(COMMITS))):
            (commits[0].parents[2] / "stop").touch()
            settings = {**settings, "stops": False}
        if any(statuses.values()) or time.monotonic() > give_up:
            for other in set(pids) - set(statuses):
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def fork(rank: int, ranks: int, settings: dict[str, Any], store: Path) -> int:
    def train() -> None:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        if "script" in settings:
            os.environ |= {"HOLDFAST_ROOT": settings["root"], CHECKPOINT_INTERVAL: "20"}
            sys.argv = [settings["script"], *settings["arguments"]]
            runpy.run_path(settings["script"], run_name="__main__")
        else:
            sys.argv = ["accelerate_program.py", json.dumps(settings)]
            accelerate_program.main()

    return start_child(train)


if __name__ == "__main__":
    main()
