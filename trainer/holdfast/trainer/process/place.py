"""The place of a rank whose torchrun runs on one node of several, without the others.

Such a torchrun can be started before it is known which place its node will have. Its ranks read
where they meet when the launch begins.
"""

from __future__ import annotations

import json
import os
from typing import Final

# torchrun sets it for ranks whose store it has itself. Rank 0 has that of such a launch.
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


def take_place(path: str) -> None:
    """Set the variables of this rank from the file at `path`, which the agent has written."""
    with open(path, "rb") as stream:
        given: dict[str, str] = json.load(stream)
    first = int(given.pop("first_rank"))
    rank = str(first + int(os.environ["LOCAL_RANK"]))
    os.environ.update({**given, "RANK": rank, "ROLE_RANK": rank, AGENT_STORE: "False"})
