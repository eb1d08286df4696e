"""Starts a program that handles a signal itself.

`python -m holdfast.workers.agent.program_start SIGTERM <folder> <command …>` becomes the command.
The guard ignores the signals by which clusters announce an end, and so does what it starts. The
program gets the default action of the one signal that the agent will send it. Shells cannot handle
a signal that was ignored when they began, and some frameworks leave such a signal alone. With a
`<folder>`, the output goes to `stdout.log` and `stderr.log` there. An empty one leaves it as it is.

Standard library only: it is started once per rank and should cost little.
"""

from __future__ import annotations

import os
import signal
import sys

NOT_STARTED_EXIT_CODE = 127


def main(name: str, folder: str, *command: str) -> None:
    """Become `command`. Ends with `NOT_STARTED_EXIT_CODE` if it cannot be started."""
    if name != "none":
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    if folder:
        os.makedirs(folder, exist_ok=True)
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(os.path.join(folder, f"{stream}.log"), flags, 0o666), descriptor)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(NOT_STARTED_EXIT_CODE)


if __name__ == "__main__":
    main(*sys.argv[1:])
