"""`health` of a run spec: commands that every node runs to find out whether it can train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.contracts.spec.part import SpecPart

CHECKS_MAX = 16
CHECK_S_MAX = 3600.0
Check = Annotated[str, Field(min_length=1, max_length=4096)]


class Health(SpecPart):
    """Checks of the nodes. Exit status 0 means healthy."""

    before: Annotated[tuple[Check, ...], Field(max_length=CHECKS_MAX)] = Field(
        default=(),
        description="shell lines that every node runs once per attempt, before its first launch. "
        "If one fails, the node is unhealthy. Holdfast has the checks `ready`, `allreduce` and "
        "`nvrx`",
    )
    after: Annotated[tuple[Check, ...], Field(max_length=CHECKS_MAX)] = Field(
        default=(),
        description="the same, after a failure and before a restart in place",
    )
    timeout_s: Annotated[float, Field(gt=0, le=CHECK_S_MAX)] = Field(
        default=60.0, description="longest time that one check may take. A longer one has failed"
    )
