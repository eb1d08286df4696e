"""The environment variables by which an agent passes the run's context to the ranks."""

from __future__ import annotations

import math
import os
import re
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
# the interval, the snapshots, the overlap and the staging only if somebody wrote them: the program
# may give its own.
CHECKPOINT_INTERVAL: Final = "HOLDFAST_CHECKPOINT_INTERVAL"
# `checkpoint.doubling_steps` of the spec.
CHECKPOINT_DOUBLING_STEPS: Final = "HOLDFAST_CHECKPOINT_DOUBLING_STEPS"
CHECKPOINT_MIRROR: Final = "HOLDFAST_CHECKPOINT_MIRROR"
CHECKPOINT_LOCAL: Final = "HOLDFAST_CHECKPOINT_LOCAL"
# Address of `holdfast serve`, for links in Prefect's artifacts.
PAGE_URL: Final = "HOLDFAST_PAGE_URL"
# The token with which `holdfast mcp` calls that server.
TOKEN: Final = "HOLDFAST_TOKEN"
# Address of an S3 store other than Amazon's. `AWS_ENDPOINT_URL` has the same effect.
S3_ENDPOINT: Final = "HOLDFAST_S3_ENDPOINT"
# Address of interruption notices, for nodes that do not reach the cloud's own address.
NOTICES_URL: Final = "HOLDFAST_NOTICES_URL"
CHECKPOINT_SNAPSHOTS: Final = "HOLDFAST_CHECKPOINT_SNAPSHOTS"
CHECKPOINT_OVERLAP: Final = "HOLDFAST_CHECKPOINT_OVERLAP"
CHECKPOINT_STAGING: Final = "HOLDFAST_CHECKPOINT_STAGING"
# The directory on each node's own disk for the images of `checkpoint.staging = "disk"`.
STAGING_DIRECTORY: Final = "HOLDFAST_STAGING_DIRECTORY"
# Set where the spec has `checkpoint.neighbour`, which the program's own staging must fit.
CHECKPOINT_NEIGHBOUR: Final = "HOLDFAST_CHECKPOINT_NEIGHBOUR"
# `checkpoint.write_limit` of the spec, for the ranks and their flusher.
CHECKPOINT_WRITE_LIMIT: Final = "HOLDFAST_CHECKPOINT_WRITE_LIMIT"
# `supervision.numerics` of the spec, as JSON.
NUMERICS: Final = "HOLDFAST_NUMERICS"
# `supervision.flush_timeout_s` of the spec, for the ranks and their flusher.
FLUSH_TIMEOUT: Final = "HOLDFAST_FLUSH_TIMEOUT_S"
FLUSH_TIMEOUT_DEFAULT_S: Final = 1800.0
FLUSH_TIMEOUT_MAX_S: Final = 1e9
# The pipe from which a warm standby reads the signal to start.
STANDBY_PIPE: Final = "HOLDFAST_STANDBY_PIPE"
# The file with the place of a rank whose torchrun runs on one node of several.
PLACE: Final = "HOLDFAST_PLACE"
# What a consumer of a checkpoint gets, see `on` of the spec.
RUN: Final = "HOLDFAST_RUN"
CONSUMER: Final = "HOLDFAST_CONSUMER"
CHECKPOINT: Final = "HOLDFAST_CHECKPOINT"
CHECKPOINT_PATH: Final = "HOLDFAST_CHECKPOINT_PATH"
CHECKPOINT_STEP: Final = "HOLDFAST_CHECKPOINT_STEP"
# The file to which it may write its metrics, as JSON.
METRICS_FILE: Final = "HOLDFAST_METRICS_FILE"

# The addresses that people set, each with the schemes that act and an example.
_ADDRESSES: Final[Mapping[str, tuple[str, str]]] = {
    PAGE_URL: ("https?", "https://holdfast.example.org"),
    S3_ENDPOINT: ("https?", "https://s3.example.org"),
    # Nodes ask for notices by plain HTTP.
    NOTICES_URL: ("http", "http://169.254.169.254"),
}
_HOST_AND_PATH: Final = r"://[^\s/:?#@]+(:[0-9]{1,5})?(/[^\s?#]*)?"

# The keys of a spec that set these variables for the program.
KEYS_OF_VARIABLES: Final[Mapping[str, str]] = {
    CONFIG: "config",
    CHECKPOINT_INTERVAL: "checkpoint.interval",
    CHECKPOINT_DOUBLING_STEPS: "checkpoint.doubling_steps",
    CHECKPOINT_SNAPSHOTS: "checkpoint.snapshots",
    CHECKPOINT_OVERLAP: "checkpoint.overlap",
    CHECKPOINT_STAGING: "checkpoint.staging",
    STAGING_DIRECTORY: "checkpoint.staging_directory",
    CHECKPOINT_NEIGHBOUR: "checkpoint.neighbour",
    CHECKPOINT_WRITE_LIMIT: "checkpoint.write_limit",
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
    if not 0 < seconds <= FLUSH_TIMEOUT_MAX_S:
        raise SpecError(
            f"{FLUSH_TIMEOUT}={given!r}: expected a positive number of seconds, at most "
            f"{FLUSH_TIMEOUT_MAX_S:.0e}"
        )
    return seconds


def problems_with_addresses(env: Mapping[str, object]) -> list[str]:
    """Return a line for each variable of `env` that should be an address and is none."""
    return [problem for name in _ADDRESSES if (problem := problem_with_address(name, env))]


def problem_with_address(name: str, env: Mapping[str, object]) -> str | None:
    """Return the problem with an address in a variable as text, or None."""
    (schemes, example), given = _ADDRESSES[name], env.get(name)
    # A reference to a secret has no value here.
    if not given or not isinstance(given, str) or re.fullmatch(schemes + _HOST_AND_PATH, given):
        return None
    return f"{name}={given!r}: expected an address such as {example}"
