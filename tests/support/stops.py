"""Holds a rank that asked for a stop until the ranks have been told after which step to leave."""

from __future__ import annotations

import threading
from typing import Final

# Far longer than the stop coordinator needs on a slow machine. It polls twenty times a second.
HEARD_S: Final = 20.0
# The thread of a rank without an agent. It ends when a step is agreed on.
COORDINATOR: Final = "holdfast-stop"


def hold_until_agreed() -> None:
    """Wait until the stop coordinator of this process has agreed with all ranks on a step.

    Only local rank 0 has one. The other ranks should wait for it in a barrier: the step is then
    the one that all of them are in. Returns at once where no session is open.
    """
    for thread in threading.enumerate():
        if thread.name == COORDINATOR:
            thread.join(HEARD_S)
