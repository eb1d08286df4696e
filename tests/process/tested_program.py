"""`agent_program` with a paired test and steps that a test can hold at a certain place.

The setting `holds` is a folder. A rank waits at a place as long as the folder has a file of its
name: `work-RANK` and `links-RANK` in a paired test, `step-STEP` in a step of all ranks. While it
waits, the folder has a file `PLACE.RANK`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.trainer import Session
from holdfast.trainer.ranks import paired_test

RANK = os.environ["RANK"]
HOLDS = Path(json.loads(sys.argv[1])["holds"])


def wait_at(place: str) -> None:
    if (HOLDS / place).exists():
        (HOLDS / f"{place}.{RANK}").touch()
        while (HOLDS / place).exists():
            time.sleep(0.01)


def hold() -> None:
    test: Any = paired_test
    links, session = test._Links, Session
    _wrap(test, "_host_work_s", lambda *_: f"work-{RANK}")
    _wrap(links, "measure", lambda *_: f"links-{RANK}")
    _wrap(session, "batch", lambda session, *_: f"step-{session.step + 1}")


def _wrap(owner: Any, name: str, place_of: Any) -> None:
    """Let a function wait at a place before it does its work."""
    act = getattr(owner, name)

    def held(*given: Any) -> Any:
        wait_at(place_of(*given))
        return act(*given)

    setattr(owner, name, held)


if __name__ == "__main__":
    hold()
    # Its folder is that of the program.
    import_module("agent_program").main()
