"""The environment variables by which an agent passes the run's context to the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

from holdfast.contracts.errors import SpecError

# The folder of all runs, by which a program names checkpoints of other runs.
ROOT: Final = "HOLDFAST_ROOT"
RUN_DIRECTORY: Final = "HOLDFAST_RUN_DIR"
ATTEMPT: Final = "HOLDFAST_ATTEMPT"
LAUNCH: Final = "HOLDFAST_LAUNCH"
NODE: Final = "HOLDFAST_NODE"
NODES: Final = "HOLDFAST_NODES"
RANK_STATUS: Final = "HOLDFAST_RANK_STATUS"
FLUSHER: Final = "HOLDFAST_FLUSHER"
CONFIG: Final = "HOLDFAST_CONFIG"
# Where the values come from that the agent passes on, as JSON: see `contracts.written`.
SOURCES: Final = "HOLDFAST_SOURCES"
# The next ones come from the spec, so that the program needs no arguments for them. An agent sets
# the interval and the snapshots only if somebody wrote them: the program may give its own.
CHECKPOINT_INTERVAL: Final = "HOLDFAST_CHECKPOINT_INTERVAL"
CHECKPOINT_MIRROR: Final = "HOLDFAST_CHECKPOINT_MIRROR"
CHECKPOINT_LOCAL: Final = "HOLDFAST_CHECKPOINT_LOCAL"
# Address of an S3 store other than Amazon's. `AWS_ENDPOINT_URL` has the same effect.
S3_ENDPOINT: Final = "HOLDFAST_S3_ENDPOINT"
# Address of interruption notices, for nodes that do not reach the cloud's own address.
NOTICES_URL: Final = "HOLDFAST_NOTICES_URL"
CHECKPOINT_SNAPSHOTS: Final = "HOLDFAST_CHECKPOINT_SNAPSHOTS"
# `supervision.numerics` of the spec, as JSON.
NUMERICS: Final = "HOLDFAST_NUMERICS"
# `supervision.flush_timeout_s` of the spec, for the ranks and their flusher.
FLUSH_TIMEOUT: Final = "HOLDFAST_FLUSH_TIMEOUT_S"
FLUSH_TIMEOUT_DEFAULT_S: Final = 1800.0
# The pipe from which a warm standby reads the signal to start.
STANDBY_PIPE: Final = "HOLDFAST_STANDBY_PIPE"

# The keys of a spec that set these variables for the program.
KEYS_OF_VARIABLES: Final[Mapping[str, str]] = {
    CONFIG: "config",
    CHECKPOINT_INTERVAL: "checkpoint.interval",
    CHECKPOINT_SNAPSHOTS: "checkpoint.snapshots",
    CHECKPOINT_MIRROR: "checkpoint.mirror",
    CHECKPOINT_LOCAL: "checkpoint.local",
    NOTICES_URL: "supervision.notices_url",
    NUMERICS: "supervision.numerics",
    FLUSH_TIMEOUT: "supervision.flush_timeout_s",
}


def flush_timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """Return the longest time, in seconds, that a save may take to become durable.

    Raises `SpecError` if the environment variable is not a positive number.
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
