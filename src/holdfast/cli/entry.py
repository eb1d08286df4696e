"""The entry point of `holdfast`. It imports the commands, which takes a moment, on its own."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from typing import Final

# New objects until the collector looks for garbage. Imports make many objects and no garbage.
NEW_OBJECTS_MAX: Final = 20_000


def main() -> None:
    """Run the command line. An interrupt before it has begun ends it without a traceback."""
    gc.set_threshold(NEW_OBJECTS_MAX, *gc.get_threshold()[1:])
    # At the end Python would look at all objects again, although the process returns its memory.
    atexit.register(gc.freeze)
    try:
        from holdfast.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()
