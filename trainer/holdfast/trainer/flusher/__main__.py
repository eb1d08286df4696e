"""The flusher's command line: `python -m holdfast.trainer.flusher`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Final

from holdfast.contracts.node import wire
from holdfast.contracts.spec.checkpoint import write_limit
from holdfast.trainer.flusher.hints import Hints
from holdfast.trainer.flusher.service import Flusher
from holdfast.trainer.mirror.worker import start_mirror

IGNORED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, leave the parent's session and serve."""
    # Slurm signals every process of a step. The flusher must outlive the ranks to commit what they
    # sealed.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.flusher")
    help_text = "inherited file to which the socket's name is written"
    parser.add_argument("--address-fd", type=int, required=True, help=help_text)
    parser.add_argument("--node", type=int, required=True, help="number of this node, from 0")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes of the attempt")
    parser.add_argument("--supervisor-fd", type=int, help="inherited socket to the supervisor")
    parser.add_argument("--hints-fd", type=int, help="inherited eventfd for the agent's hints")
    parser.add_argument("--budget", type=int, help="byte limit for all checkpoints of the run")
    parser.add_argument("--run", type=Path, help="run folder; resumes unfinished mirror copies")
    given = parser.parse_args(argv)
    with contextlib.suppress(OSError):
        # Signals to the parent's process group must not reach the flusher. The call fails in a
        # process that already leads a group.
        os.setsid()
    supervisor = None if given.supervisor_fd is None else socket.socket(fileno=given.supervisor_fd)
    listener = wire.listen(given.address_fd, given.run)
    mirror, hints = start_mirror(given.node, given.run), Hints(given.hints_fd)
    Flusher(listener, supervisor, given.budget, mirror, hints, write_limit()).run()


if __name__ == "__main__":
    main()
