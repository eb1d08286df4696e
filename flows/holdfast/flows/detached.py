"""`python -m holdfast.flows.detached RUN_DIRECTORY`: supervise one run in this process.

It is used without a Prefect API. It needs no server and no database of Prefect, and nothing
remains if the process is killed. With `--flow` and an API in the environment, Prefect's flow
`train` supervises the run instead.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.states import RunState

FLOW: Final = "--flow"
USAGE: Final = "usage: python -m holdfast.flows.detached [--flow] RUN_DIRECTORY"


def main(arguments: list[str]) -> int:
    """Return 0 if the run completed, 1 if it failed or was cancelled, 2 for a wrong call."""
    match arguments:
        case [flag, directory] if flag == FLOW:
            return run_flow(Path(directory))
        case [directory] if directory != FLOW:
            return supervise(Path(directory))
        case _:
            print(USAGE, file=sys.stderr)
            return 2


def supervise(directory: Path) -> int:
    from holdfast.flows.supervisor.carry import carry
    from holdfast.lineage.index import Index

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
