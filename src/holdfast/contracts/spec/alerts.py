"""`alerts` of a run spec: limits that people want to know about, and targets of notifications."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.spec.secrets import OnlyReference

TARGETS_MAX = 16
Topic = Literal[
    "failed", "completed", "preempted", "hang", "node", "loss", "save", "limit", "decision"
]
TargetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class Alerts(SpecPart):
    """Notifications of a run: their targets, their topics, and limits."""

    targets: Annotated[dict[TargetName, OnlyReference], Field(max_length=TARGETS_MAX)] = Field(
        default_factory=dict,
        description="addresses for notifications, each a reference to a secret. The secret is an "
        "address of Apprise, such as `slack://…`, `mailtos://…` or `jsons://host/path`",
    )
    on: tuple[Topic, ...] = Field(
        default=("failed", "hang", "node", "loss", "save", "limit"),
        description="what notifications are sent for: the run's end as `failed` or `completed`, "
        "each preemption, a hang, a lost or unhealthy node, a bad loss, a failed save or damaged "
        "checkpoint, a limit of `alerts`, and each decision of the supervisor",
    )
    ettr_min: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="least productive share of the run's time, from its second hour on",
    )
    checkpoint_age_max_min: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="most minutes of training since the newest checkpoint"
    )
    gpu_hours_max: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="GPU hours that the run may use. The alert comes at 90 %"
    )
