"""`python -m holdfast.flows.detached RUN_DIRECTORY`: the flow of one run, with no worker.

Two processes: the flow, and a small one that waits for it. A flow that is killed cannot end the
temporary server that Prefect started for it; the waiting one does, by the flow's process group.
Jobs have sessions of their own and are not touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

FLOW: Final = "--flow"
USAGE: Final = "usage: python -m holdfast.flows.detached RUN_DIRECTORY"


def main(arguments: list[str]) -> int:
    """0 when the run completed, 1 when it failed or was cancelled, 2 for a wrong call."""
    match arguments:
        case [flag, directory] if flag == FLOW:
            return run_flow(Path(directory))
        case [directory] if directory != FLOW:
            return wait_for_flow(directory)
        case _:
            print(USAGE, file=sys.stderr)
            return 2


def run_flow(directory: Path) -> int:
    """Run the flow to its end in this process; its exit status."""
    from holdfast.contracts.paths import RunPaths
    from holdfast.flows.start import flow_parameters
    from holdfast.flows.train import train

    state = train(**flow_parameters(RunPaths(directory)), return_state=True)
    return 0 if state.is_completed() else 1


def wait_for_flow(directory: str) -> int:
    """Start the flow in a process group of its own, and end what is left of it after it."""
    command = [sys.executable, "-m", "holdfast.flows.detached", FLOW, directory]
    flow = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        flow.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    # No bound: this waits for as long as the run goes on, and costs nothing.
    status = flow.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(flow.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
