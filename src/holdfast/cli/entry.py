"""The entry point of `holdfast`. It imports the commands, which takes a moment, on its own."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line. An interrupt before it has begun ends it without a traceback."""
    try:
        from holdfast.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()
