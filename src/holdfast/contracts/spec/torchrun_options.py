"""The torchrun options that a spec must not contain, because Holdfast sets them itself."""

from __future__ import annotations

import re
from typing import Final

_OPTION: Final = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_SIZE: Final = "set resources.nodes and resources.gpus_per_node"
_MEETING: Final = "leave it out: node 0's agent chooses where the ranks meet at each launch"
_PROGRAM: Final = "set command"
_LOGS: Final = "leave it out: Holdfast writes the output to the run's folder, see holdfast logs"
_ENDINGS: Final = "leave it out: the agent restarts and ends the ranks"
REFUSED: Final = {
    "nnodes": _SIZE,
    "nproc-per-node": "set resources.nproc_per_node",
    "node-rank": _SIZE,
    "rdzv-backend": _MEETING,
    "rdzv-endpoint": _MEETING,
    "rdzv-id": _MEETING,
    "rdzv-conf": _MEETING,
    "standalone": _MEETING,
    "local-addr": _MEETING,
    "master-addr": _MEETING,
    "master-port": _MEETING,
    "max-restarts": _ENDINGS,
    "monitor-interval": _ENDINGS,
    "signals-to-handle": _ENDINGS,
    "shutdown-timeout": _ENDINGS,
    "log-dir": _LOGS,
    "redirects": _LOGS,
    "tee": _LOGS,
    "local-ranks-filter": _LOGS,
    "module": _PROGRAM,
    "no-python": _PROGRAM,
    "run-path": _PROGRAM,
}


def problem_with_torchrun(option: str) -> str:
    """Return why `launch.torchrun` must not contain `option`; empty if it may.

    torchrun accepts underscores for hyphens and unique beginnings of names.
    """
    found = _OPTION.fullmatch(option.replace("_", "-", option.partition("=")[0].count("_")))
    if found is None:
        return f"option {option!r}: expected one option with its value, as in --numa-binding=node"
    refused = next((name for name in REFUSED if name.startswith(found[1])), None)
    return "" if refused is None else f"option {option!r} is not for torchrun: {REFUSED[refused]}"
