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
from pathlib import Path
from typing import Any

import agent_program

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
    work_s, measure, batch = paired_test._host_work_s, paired_test._Links.measure, Session.batch

    def held_work_s() -> float:
        wait_at(f"work-{RANK}")
        return work_s()

    def held_measure(self: paired_test._Links) -> float:
        wait_at(f"links-{RANK}")
        return measure(self)

    def held_batch(self: Session, *given: Any) -> list[int]:
        wait_at(f"step-{self.step + 1}")
        return batch(self, *given)

    vars(paired_test)["_host_work_s"] = held_work_s
    paired_test._Links.measure = held_measure  # type: ignore[method-assign]
    Session.batch = held_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    hold()
    agent_program.main()
