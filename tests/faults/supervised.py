"""Runs one supervisor, with the fault shim: `python supervised.py RUN_DIRECTORY`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from holdfast.contracts.disk.paths import RunPaths
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index

# The jobs that it submits must not load the shim.
for name in ("LD_PRELOAD", "FAULT_ROOT", "FAULT_CONTROL", "FAULT_TRACE"):
    os.environ.pop(name, None)

if __name__ == "__main__":
    with Index() as index:
        log = logging.getLogger("holdfast.test")
        paths = RunPaths(Path(sys.argv[1]))
        print(Supervisor(paths=paths, index=index, log=log, submit=submit_next).run().state)
