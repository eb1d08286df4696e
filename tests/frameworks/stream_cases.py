"""Runs launches of `stream_program` one after another, with forked ranks.

    python -m tests.frameworks.stream_cases LAUNCHES

LAUNCHES is a JSON list of [ranks, settings, environment]. Ranks are forked, because the import of a
framework takes longer than a launch. After each launch, prints a line with "STATUSES" and the exit
statuses of its ranks as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.frameworks import stream_program
from tests.process.stream_program import import_streaming
from tests.support.forked_child import start_child

LAUNCH_S: Final = 240.0
# What makes the ranks those of torchrun, for Lightning.
OF_TORCHRUN: Final = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "cases",
}
MODULES: Final = {
    "accelerate": "accelerate.accelerator",
    "fabric": "lightning.fabric_drop_in",
    "lightning": "lightning.fit",
    "transformers": "transformers.trainer",
}
# What these import when they are used.
LATER: Final = {"transformers": ("deepspeed", "datasets"), "accelerate": ("deepspeed", "datasets")}


def main() -> None:
    torch.set_num_threads(1)
    launches = json.loads(sys.argv[1])
    for _, settings, _ in launches:
        if settings["source"] == "streaming":
            # It declares operators of torchvision, which frameworks import where it is installed.
            import_streaming()
        framework = settings["framework"]
        import_module(f"holdfast.trainer.frameworks.{MODULES[framework]}")
        for name in LATER.get(framework, ("datasets",)):
            import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        for number, (ranks, settings, environment) in enumerate(launches):
            store = Path(folder) / f"store-{number}"
            print("STATUSES", json.dumps(run(ranks, settings, environment, store)), flush=True)


def run(ranks: int, settings: Any, environment: dict[str, str], store: Path) -> list[int]:
    """One launch. If one rank fails, the others are killed, as torchrun does it."""
    pids = [fork(rank, ranks, settings, environment, store) for rank in range(ranks)]
    statuses: dict[int, int] = {}
    give_up = time.monotonic() + LAUNCH_S
    while len(statuses) < ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        if any(statuses.values()) or time.monotonic() > give_up:
            for other in set(pids) - set(statuses):
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def fork(rank: int, ranks: int, settings: Any, environment: dict[str, str], store: Path) -> int:
    def train() -> None:
        # The test reads what the ranks report, too.
        os.dup2(1, 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {**OF_TORCHRUN, **environment}
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        sys.argv = ["stream_program.py", json.dumps(settings)]
        stream_program.main()

    return start_child(train)


if __name__ == "__main__":
    main()
