"""The environment variables by which an agent tells the program's ranks where they are."""

from __future__ import annotations

from typing import Final

RUN_DIRECTORY: Final = "HOLDFAST_RUN_DIR"
ATTEMPT: Final = "HOLDFAST_ATTEMPT"
INCARNATION: Final = "HOLDFAST_INCARNATION"
NODE: Final = "HOLDFAST_NODE"
NODES: Final = "HOLDFAST_NODES"
BOARD: Final = "HOLDFAST_BOARD"
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
# Where a rank that was started ahead waits for the word to begin.
GATE: Final = "HOLDFAST_GATE"
