"""The difference between Slurm's clock and this node's. Slurm's times are by its own clock."""

from __future__ import annotations

import re
from typing import Final

from holdfast.contracts.node import steady
from holdfast.workers.schedulers import slurm_client

CLOCKS_AGREE_S: Final = 3.0


def slurm_lead_s(timeout_s: float) -> float:
    """Return the seconds by which the controller's clock is ahead of `steady.now`.

    Slurm shows whole seconds, so small differences count as none. Raises like `slurm_client.call`.
    """
    out = slurm_client.call(["scontrol", "show", "config"], timeout_s)
    found = re.search(r"Configuration data as of (\S+)", out)
    theirs = slurm_client.parse_time(found[1]) if found else None
    lead_s = 0.0 if theirs is None else theirs - steady.now()
    return lead_s if abs(lead_s) > CLOCKS_AGREE_S else 0.0
