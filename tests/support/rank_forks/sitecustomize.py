"""Lets torchrun fork its ranks. Python imports this file if its folder is in `PYTHONPATH`."""

import gc
import sys
from pathlib import Path

TORCHRUN = "torch.distributed.run"
# torchrun, or the module that loads it before a launch starts it.
LOADED = ["-m", "holdfast.workers.agent.loaded_start", TORCHRUN]

if sys.orig_argv[1:3] == ["-m", TORCHRUN] or sys.orig_argv[1:4] == LOADED:
    # The collector and the end of this process would inspect all objects of torch: 2 s of a core.
    gc.disable()
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.support import fork_server

    sys.path.pop()
    fork_server.fork_ranks()
    gc.freeze()
    gc.enable()
