"""Bounds on every number and text that Holdfast reads from a file.

Each bound is far above what any cluster needs, and low enough for every database column, sum and
clock that uses the value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

INTEGER_MAX: Final = 2**63 - 1
# The end of the year 9999 without its last days. Later times have no local date.
TIME_MAX: Final = 253_402_000_000.0
SECONDS_MAX: Final = 1e9
BYTES_MAX: Final = 2**50
STEP_MAX: Final = 10**15
RANKS_MAX: Final = 10**7
NODES_MAX: Final = 10**6
GPUS_PER_NODE_MAX: Final = 10**4
NUMBER_MAX: Final = 10**9
REAL_MAX: Final = sys.float_info.max
NAME_CHARACTERS_MAX: Final = 1000
PATH_CHARACTERS_MAX: Final = 8192
TEXT_CHARACTERS_MAX: Final = 4 * 1024 * 1024
DEPTH_MAX: Final = 64
UID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The form that `create_run` generates.
MADE_UID: Final = re.compile(r"[0-9a-f]{32}")

# A point in Unix time, and a duration.
Moment = Annotated[float, Field(ge=0, le=TIME_MAX)]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
Count = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
ByteCount = Annotated[int, Field(ge=0, le=BYTES_MAX)]
# -1 means that there is no step yet.
Step = Annotated[int, Field(ge=-1, le=STEP_MAX)]
Ranks = Annotated[int, Field(ge=0, le=RANKS_MAX)]
# Numbers of attempts, launches, nodes and processes. Exit codes of signals are negative.
Number = Annotated[int, Field(ge=-NUMBER_MAX, le=NUMBER_MAX)]
# Any finite number, such as a metric that the program logged.
Real = Annotated[float, Field(ge=-REAL_MAX, le=REAL_MAX)]
Percent = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
Name = Annotated[str, Field(max_length=NAME_CHARACTERS_MAX)]
FilePath = Annotated[str, Field(max_length=PATH_CHARACTERS_MAX)]
Text = Annotated[str, Field(max_length=TEXT_CHARACTERS_MAX)]
# It reaches command lines of the scheduler. A claim that is closed has none.
JobId = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.+\[\]-]{0,99})?$")]
Uid = Annotated[str, Field(pattern=f"^{UID.pattern}$")]

_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")


def has_long_number(content: bytes) -> bool:
    """True when JSON may contain an integer of more than 64 bits. A cheap first check."""
    return _LONG_NUMBER.search(content) is not None


def problem_with_numbers(value: Any, depth: int = 0) -> str | None:
    """Return the problem with a nested document, or None: a too large integer or deep nesting."""
    # Checked first, because deep nesting would end this recursion with a RecursionError.
    if depth > DEPTH_MAX:
        return f"nested more than {DEPTH_MAX} deep"
    if type(value) is int and abs(value) > INTEGER_MAX:
        return f"an integer of {value.bit_length()} bits, expected at most 64"
    if isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list | tuple):
        return None
    found = (problem_with_numbers(item, depth + 1) for item in value)
    return next((problem for problem in found if problem), None)
