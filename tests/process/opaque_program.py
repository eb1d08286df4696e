"""A program without Holdfast and without torch, which saves and resumes by itself.

Its settings are one JSON argument. It writes `checkpoint-<step>` directories below `out`, each with
`state.json` last, starts at the newest one that has that file, and saves at a SIGTERM. Under
torchrun each rank counts steps, and rank 0 saves. Once the file `hurry` exists, steps do not sleep.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Without torchrun, the program runs once on each node.
RANK = int(os.environ.get("RANK") or os.environ.get("NODE_RANK", "0"))


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = Path(settings["out"])
    wants_end: list[int] = []
    heeds = settings.get("heeds_signals", True)
    signal.signal(signal.SIGTERM, lambda number, _: wants_end.append(number) if heeds else None)
    step = newest(out)
    print(f"rank {RANK} starts after step {step}", flush=True)
    while step < settings["steps"]:
        step += 1
        print(f"epoch 1 | step {step} | loss {1 / step:.3f}", flush=True)
        if not Path(settings["hurry"]).exists():
            time.sleep(settings["sleep_s"])
        is_due = step % settings["every"] == 0 or step == settings["steps"]
        if is_due or wants_end:
            save(out, step, settings)
        if wants_end:
            print(f"rank {RANK} was told to end", flush=True)
            return
    print("all steps are done", flush=True)


def newest(out: Path) -> int:
    """The step of the newest checkpoint that is complete, or 0."""
    complete = out.glob("checkpoint-*/state.json")
    return max((int(path.parent.name.partition("-")[2]) for path in complete), default=0)


def save(out: Path, step: int, settings: dict[str, Any]) -> None:
    """Write one checkpoint, and delete those before the last `keep`."""
    if RANK:
        return
    folder = out / f"checkpoint-{step}"
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    (folder / "weights" / "part-0.bin").write_bytes(bytes([step % 251]) * 100_000)
    if settings.get("completes", True):
        (folder / "state.json").write_text(json.dumps({"step": step}))
    there = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    for old in there[: -settings.get("keep", 1000)]:
        shutil.rmtree(old)


if __name__ == "__main__":
    main()
