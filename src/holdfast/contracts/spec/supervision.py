"""`supervision` of a run spec: how Holdfast watches an attempt, and how often it relaunches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, Strict, field_validator

from holdfast.contracts.node.handshake import parse_ports
from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.states import Cause

_PLAIN_HTTP = re.compile(r"http://[^\s/:@]+(:[0-9]{1,5})?(/[^\s?#]*)?")

SilentPhase = Literal[
    "start", "rendezvous", "load", "compile", "train", "eval", "save", "stop", "done"
]


NumericsAction = Literal["stop", "skip", "rollback", "warn"]


class Numerics(SpecPart):
    """The action after a loss that is not finite, or is far above the losses before it."""

    on_nan: NumericsAction = Field(
        default="stop", description="action after a loss that is NaN or infinite"
    )
    on_spike: NumericsAction = Field(
        default="warn", description="action after a loss far above those before it"
    )
    metric: str = Field(default="loss", description="logged metric to watch")
    window: Annotated[int, Field(ge=8)] = Field(
        default=100, description="number of losses that a spike is compared with"
    )
    spike_mads: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        description="median absolute deviations above the median that count as a spike",
    )
    margin_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="least number of steps between the target of a rollback and the loss",
    )
    skip_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="steps of data to skip: around the loss by a rollback, after it by a skip",
    )
    changes_max: Annotated[int, Field(ge=0)] = Field(
        default=5, description="most rollbacks and skips of a run, until an operator relaunches it"
    )


class Supervision(SpecPart):
    """How Holdfast watches an attempt, and how often it relaunches after each cause."""

    heartbeat_s: Annotated[float, Field(gt=0)] = Field(
        default=2.0, description="seconds between two heartbeats of a node"
    )
    poll_s: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="seconds between two checks by the supervisor"
    )
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="seconds between the signal of a preemption and the kill"
    )
    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        default="auto", description="cloud whose interruption notices the nodes listen for"
    )
    notices_url: str = Field(
        default="",
        description="address of the notices, as `http://host:port`. Empty: the cloud's own address",
    )
    flush_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="longest time that a stop without a deadline may take, and that a save may "
        "take until it is durable",
    )
    join_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="longest time that node 0 and the other nodes of a job wait for each other",
    )
    pending_timeout_min: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="minutes that Slurm may keep a job pending, at the last of "
        "`resources.fallbacks`. Holdfast then takes it back and submits a smaller one, or pauses "
        "the run if `elastic` allows none. None: no limit",
    )
    ports: str = Field(
        default="any",
        pattern=r"^(any|[0-9]{1,5}-[0-9]{1,5})$",
        description="ports between nodes, for the agents and the torchrun store, as `40000-40063`",
    )
    restarts_in_place: Annotated[int, Field(ge=0)] = Field(
        default=3, description="restarts of torchrun inside one attempt"
    )
    standby_after_s: Annotated[float, Field(ge=0)] | Literal["off"] = Field(
        default=3.0,
        description="seconds of training after which the warm standby starts: a second torchrun "
        "that loads the ranks' libraries and waits for the next restart in place. "
        "`off` starts none",
    )
    hangs: bool = Field(
        default=True, description="examine silent ranks, and end and restart those that hang"
    )
    silence_s: dict[SilentPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="seconds of silence in a phase before Holdfast ends anything, as `{ train = "
        "60, eval = 900 }`. Empty: the limits of each phase",
    )
    numerics: Numerics = Numerics()
    budgets: dict[Annotated[Cause, Strict(False)], Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="relaunches allowed per cause, as `{ hang = 2 }`. Empty: the default budgets",
    )
    backoff_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="seconds before the first relaunch after a failure. Each further failure of "
        "the same cause doubles the delay, up to ten minutes. Preemptions, time limits "
        "and the first loss of a node have no back-off",
    )
    allow_early_exit: bool = Field(
        default=False,
        description="accept a program that exits with status 0 before its last step as completed. "
        "`holdfast submit --allow-early-exit` sets it",
    )
    attempts_max: Annotated[int, Field(ge=1)] = Field(
        default=1000,
        description="most attempts of one run, also moves to a fallback and growth. An operator's "
        "relaunch may exceed it",
    )

    @field_validator("notices_url")
    @classmethod
    def _notices_url_is_plain_http(cls, value: str) -> str:
        if value and not _PLAIN_HTTP.fullmatch(value):
            raise ValueError(f"{value!r}: expected an HTTP address such as http://169.254.169.254")
        return value

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str) -> str:
        ports = parse_ports(value)
        if ports is not None and not 1 <= ports.start < ports.stop <= 65536:
            raise ValueError(f"ports {value!r}: expected FIRST-LAST between 1 and 65535")
        return value

    @property
    def port_range(self) -> range | None:
        """The ports that nodes may use to reach each other; None for any."""
        return parse_ports(self.ports)
