"""`python -m holdfast.flows.detached RUN_DIRECTORY`: the supervision of one run, in one process.

Without a Prefect API there is no flow run to show, so the supervisor runs by itself: no server, no
database of Prefect's, and nothing that outlives this process when it is killed. With `--flow`, and
an API in the environment, the run is carried by Prefect's flow `train` instead.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from holdfast.contracts.paths import RunPaths
from holdfast.contracts.states import RunState

FLOW: Final = "--flow"
USAGE: Final = "usage: python -m holdfast.flows.detached [--flow] RUN_DIRECTORY"


def main(arguments: list[str]) -> int:
    """0 when the run completed, 1 when it failed or was cancelled, 2 for a wrong call."""
    match arguments:
        case [flag, directory] if flag == FLOW:
            return run_flow(Path(directory))
        case [directory] if directory != FLOW:
            return supervise(Path(directory))
        case _:
            print(USAGE, file=sys.stderr)
            return 2


def supervise(directory: Path) -> int:
    """Carry the run to its end in this process; its exit status."""
    from holdfast.flows.carry import carry

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    history = carry(RunPaths(directory), logging.getLogger("holdfast"))
    return 0 if history.state is RunState.COMPLETED else 1


def run_flow(directory: Path) -> int:
    """Run Prefect's flow to its end in this process; its exit status."""
    from holdfast.flows.start import flow_parameters
    from holdfast.flows.train import train

    state = train(**flow_parameters(RunPaths(directory)), return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
