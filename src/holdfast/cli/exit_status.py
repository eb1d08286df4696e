"""Exit statuses of the `holdfast` command."""

from __future__ import annotations

import signal
from typing import Final

# The run, checkpoint or check that the command is about is bad or failed.
FAILED: Final = 1
# The arguments are wrong.
MISUSE: Final = 2
NOT_FOUND: Final = 3
# The database, Prefect, the scheduler or the disk cannot be used.
UNAVAILABLE: Final = 4
# The arguments are right, but the state of the run or a check forbids it.
REFUSED: Final = 5
INTERRUPTED: Final = 128 + signal.SIGINT
