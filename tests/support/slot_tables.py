"""Tables of staging slots, as ranks write them."""

from __future__ import annotations

from typing import Any

from holdfast.trainer.slots.slot_table import SlotTable


def make_table(**facts: Any) -> SlotTable:
    """A table of the only rank of its run, except for these facts."""
    common: dict[str, Any] = {
        "run_directory": "/runs/r",
        "node_folder": "",
        "checkpoint": "step-00000001.a0001.l01",
        "step": 1,
        "rank": 0,
        "local_rank": 0,
        "local_ranks": 1,
        "node": 0,
        "nodes": 1,
        "world_size": 1,
        "staged_at": 0.0,
        "blocked_s": 0.0,
        "files": (),
    }
    return SlotTable(**{**common, **facts})
