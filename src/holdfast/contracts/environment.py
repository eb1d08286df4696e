"""The environment variables by which an agent tells the program's ranks where they are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

from holdfast.contracts.errors import SpecError

RUN_DIRECTORY: Final = "HOLDFAST_RUN_DIR"
ATTEMPT: Final = "HOLDFAST_ATTEMPT"
LAUNCH: Final = "HOLDFAST_LAUNCH"
NODE: Final = "HOLDFAST_NODE"
NODES: Final = "HOLDFAST_NODES"
RANK_STATUS: Final = "HOLDFAST_RANK_STATUS"
FLUSHER: Final = "HOLDFAST_FLUSHER"
CONFIG: Final = "HOLDFAST_CONFIG"
# The next come from the spec, so that the program's argv need not change to use them.
CHECKPOINT_INTERVAL: Final = "HOLDFAST_CHECKPOINT_INTERVAL"
CHECKPOINT_MIRROR: Final = "HOLDFAST_CHECKPOINT_MIRROR"
CHECKPOINT_LOCAL: Final = "HOLDFAST_CHECKPOINT_LOCAL"
# The store's own address where it is not Amazon's; `AWS_ENDPOINT_URL` does too.
S3_ENDPOINT: Final = "HOLDFAST_S3_ENDPOINT"
# Where clouds' interruption notices are served, for nodes whose cloud is not at its own address.
NOTICES_URL: Final = "HOLDFAST_NOTICES_URL"
CHECKPOINT_SNAPSHOTS: Final = "HOLDFAST_CHECKPOINT_SNAPSHOTS"
# `supervision.numerics` of the spec, as JSON.
NUMERICS: Final = "HOLDFAST_NUMERICS"
# `supervision.flush_timeout_s` of the spec, for the ranks and their flusher.
FLUSH_TIMEOUT: Final = "HOLDFAST_FLUSH_TIMEOUT_S"
FLUSH_TIMEOUT_DEFAULT_S: Final = 1800.0
# Where a rank that was started ahead waits for the word to begin.
STANDBY_PIPE: Final = "HOLDFAST_STANDBY_PIPE"


def flush_timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """The longest, in seconds, that a save may take to become durable before it is given up.

    Raises `SpecError` when what the environment says is no positive number.
    """
    given = env.get(FLUSH_TIMEOUT)
    if not given:
        return FLUSH_TIMEOUT_DEFAULT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SpecError(f"{FLUSH_TIMEOUT}={given!r}: expected a positive number of seconds")
    return seconds
