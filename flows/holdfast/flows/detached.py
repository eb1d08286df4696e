"""`python -m holdfast.flows.detached RUN_DIRECTORY`: supervise one run in this process.

It is used without a Prefect API. It needs no server and no database of Prefect, and nothing
remains if the process is killed. With `--flow` and an API in the environment, Prefect's flow
`train` supervises the run instead. With `--when-told` it only loads its modules until the command
that started it has created the run, see `loaded_supervisor`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.states import RunState
from holdfast.flows.loaded_supervisor import WHEN_TOLD, wait_until_told

FLOW: Final = "--flow"
USAGE: Final = "usage: python -m holdfast.flows.detached [--flow] RUN_DIRECTORY"


def main(arguments: list[str]) -> int:
    """Return 0 if the run completed, 1 if it failed or was cancelled, 2 for a wrong call."""
    match arguments:
        case [flag, directory] if flag == FLOW:
            return run_flow(Path(directory))
        case [flag, directory] if flag == WHEN_TOLD:
            return supervise(Path(directory), is_told=False)
        case [directory] if directory not in {FLOW, WHEN_TOLD}:
            return supervise(Path(directory))
        case _:
            print(USAGE, file=sys.stderr)
            return 2


def supervise(directory: Path, *, is_told: bool = True) -> int:
    """Supervise the run to its end. If it is not told to by then, end once all is loaded."""
    from holdfast.flows.supervisor.carry import carry
    from holdfast.lineage.index import Index

    if not is_told and not wait_until_told(RunPaths(directory).flow_log):
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with Index() as index:
        history = carry(RunPaths(directory), logging.getLogger("holdfast"), index)
    return 0 if history.state is RunState.COMPLETED else 1


def run_flow(directory: Path) -> int:
    from holdfast.flows.start import flow_parameters
    from holdfast.flows.train import train

    state = train(**flow_parameters(RunPaths(directory)), return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
