"""What torchrun and its ranks write about a failure. Pure functions of these texts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.disk.bounds import TIME_MAX

# torchrun logs this about every other rank that it ends after a failure. The ranks ignore its
# signal, and torchrun would wait half a minute before it kills them.
_ENDING: Final = re.compile(r"Sending process (\d+) closing signal")
# torchrun's report of its failed workers, which is the same in versions 1.9 to 2.13.
_FAILURE: Final = re.compile(
    r"^\[\d+\]:\n\s*time\s*: .*\n\s*host\s*: .*\n\s*rank\s*: (?P<rank>\d+) "
    r"\(local_rank: (?P<local>\d+)\)\n\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class ReportedFailure:
    """A rank in torchrun's report. `local` counts the ranks of a node, `code` is its exit code."""

    local: int
    code: int
    pid: int


def read_report(log: str) -> list[ReportedFailure]:
    """Return the failed ranks in torchrun's log."""
    return [
        ReportedFailure(local=int(match["local"]), code=int(match["code"]), pid=int(match["pid"]))
        for match in _FAILURE.finditer(log)
    ]


def ended_peers(log: str) -> set[int]:
    """Return the process ids of the ranks that torchrun ended because another rank had failed."""
    return {int(number) for number in _ENDING.findall(log)}


def read_error_file(content: bytes) -> tuple[str, float]:
    """Return the traceback and the time (Unix seconds) in a rank's error file, or ('', 0)."""
    try:
        found: dict[str, Any] = json.loads(content)
        message = found.get("message", "")
        if not isinstance(message, dict):
            return str(message), _time(found.get("timestamp", 0))
        extra = message.get("extraInfo", {})
        text = str(extra.get("py_callstack") or message.get("message", ""))
        return text, _time(extra.get("timestamp", 0))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        # A program may write any content there.
        return "", 0.0


def _time(value: Any) -> float:
    """Return Unix seconds, or 0 for a number that is no time."""
    seconds = float(value)
    return seconds if 0 <= seconds <= TIME_MAX else 0.0
