"""`python -m holdfast_bench.drills.supervisor RUN_DIRECTORY`: a supervisor without Prefect.

It is the same supervisor as in the flow `train`. A drill kills and restarts it many times, and
Prefect would take seconds for each start.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from holdfast.contracts.paths import RunPaths
from holdfast.contracts.states import RunState
from holdfast.flows.supervise import Supervisor, submit_next
from holdfast.lineage.index import Index

ENDS_WELL: Final = frozenset({RunState.COMPLETED, RunState.CANCELLED})


def main(directory: Path) -> int:
    """Supervise the run at `directory` until its end; return 0 if it completed or was cancelled."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with Index() as index:
        supervisor = Supervisor(
            paths=RunPaths(directory),
            index=index,
            log=logging.getLogger("holdfast"),
            submit=submit_next,
            flow_run="drill",
        )
        return 0 if supervisor.run().state in ENDS_WELL else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
