"""Lets torchrun fork its ranks. Python imports this file if its folder is in `PYTHONPATH`."""

import sys
from pathlib import Path

if sys.orig_argv[1:3] == ["-m", "torch.distributed.run"]:
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.support import fork_server

    sys.path.pop()
    fork_server.fork_ranks()
