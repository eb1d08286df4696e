"""What the ranks of `tests/process/stream_program` noted of their samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RANKS_MAX: Final = 3


def lines_in(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of all ranks by step and rank. Only the last launch of a step counts."""
    found: list[dict[str, Any]] = []
    for rank in range(RANKS_MAX):
        path = directory / f"samples-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        found += [{**json.loads(line), "rank": rank} for line in text.splitlines()]
    last: dict[int, int] = {}
    for line in found:
        last[line["step"]] = max(last.get(line["step"], 0), line["launch"])
    kept = [line for line in found if line["launch"] == last[line["step"]]]
    return sorted(kept, key=lambda line: (line["step"], line["rank"]))


def samples_in(directory: Path) -> list[dict[str, Any]]:
    """Return the lines without what tells launches apart."""
    return [{k: v for k, v in line.items() if k != "launch"} for line in lines_in(directory)]
