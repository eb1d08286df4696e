"""The part of a run spec about checkpoints: when to save, where to, and which ones to keep."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from holdfast.contracts import environment
from holdfast.contracts.disk.bounds import INTEGER_MAX, SECONDS_MAX, STEP_MAX
from holdfast.contracts.disk.mirrors import problem_with_mirror
from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.part import SHOWN_CHARACTERS, SpecPart

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGTP]?)(i?)B")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def _without_default(schema: dict[str, Any]) -> None:
    """Leave the default out of the schema of a form, which would fill it in as if it were given."""
    schema.pop("default", None)


class KeepBest(SpecPart):
    """The checkpoints with the best logged metric. One without the metric does not count.

    As long as no checkpoint has the metric, all are kept.
    """

    metric: Annotated[str, Field(min_length=1)] = Field(description="metric that the program logs")
    n: Annotated[int, Field(ge=1)] = Field(default=1, description="number of checkpoints")
    mode: Literal["min", "max"] = Field(
        default="min", description="whether the smallest or the largest value is the best"
    )


class Keep(SpecPart):
    """The rules for which committed checkpoints are kept, see `contracts.keep_rules`.

    Without any key, all checkpoints are kept. Pinned checkpoints, those in use or being read, and
    the newest one are always kept.
    """

    last: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="keep this many of the newest checkpoints"
    )
    best: KeepBest | None = Field(
        default=None,
        description="keep the `n` best by a metric that the program logs: `{ metric, n = 1, "
        'mode = "min" }`',
    )
    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="keep the first checkpoint at or after each multiple of this many steps",
    )
    doubling_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="keep the first checkpoint at or after this step, twice this step, four times "
        "this step and so on. `checkpoint.doubling_steps` saves at these steps",
    )
    every_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="keep the first checkpoint of each period of this many hours"
    )
    ttl: str | None = Field(
        default=None,
        description="time to live, such as `12h` or `7d`: keep every checkpoint that is younger",
    )

    @field_validator("ttl")
    @classmethod
    def _ttl_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None and not seconds_of(value):
            raise ValueError(f"{value!r}: expected a duration such as '12h' or '7d'")
        return value

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds."""
        return seconds_of(self.ttl) if self.ttl else None

    @property
    def is_limited(self) -> bool:
        """True when a rule is given. Checkpoints that no rule keeps are then deleted."""
        return any(getattr(self, name) is not None for name in type(self).model_fields)


class Checkpointing(SpecPart):
    """When the run saves, where its checkpoints go and which of them are kept."""

    interval: StrictInt | str = Field(
        default="auto",
        json_schema_extra=_without_default,
        description='interval between checkpoints: steps (`500`), time (`"300s"`, `"10m"`, '
        '`"1h"`) or `"auto"`',
    )
    doubling_steps: Annotated[StrictInt, Field(ge=1)] | None = Field(
        default=None,
        description="save also after this step, twice this step, four times this step and so on: "
        "`1` gives 1, 2, 4, 8 …. Training waits there until the save before is written",
    )
    keep: Keep = Keep()
    budget: Annotated[StrictInt, Field(ge=1)] | str | None = Field(
        default=None,
        description='most space that the run\'s checkpoints may take, as `"500GB"` or in bytes. '
        "If the next step does not fit, Holdfast first deletes what the keep rules "
        "allow. If it still does not fit, the save fails",
    )
    directory: str | None = Field(
        default=None,
        description="absolute path of a directory that all nodes share, for checkpoints on other "
        "storage than the root. A run's are in `DIRECTORY/<run>.<id>/checkpoints`, and "
        "a link in the run's folder leads there",
    )
    mirror: str | None = Field(
        default=None,
        description='URL that every checkpoint is copied to: `"s3://bucket/prefix"` or '
        '`"file:///shared/dir"`. Set credentials in the environment (`AWS_…`). For '
        "a store other than Amazon's, set `HOLDFAST_S3_ENDPOINT` or "
        "`AWS_ENDPOINT_URL`",
    )
    local: str | None = Field(
        default=None,
        description="directory on each node's own disk that files are written to first. It "
        "requires a mirror, which then holds the durable copy",
    )
    snapshots: Annotated[StrictInt, Field(ge=1)] | Literal["auto", "off"] = Field(
        default="auto",
        json_schema_extra=_without_default,
        description="steps between snapshots, which are copies in memory. If the program dies, "
        "Holdfast commits the newest one. `auto` takes as many as cost 3 % of the "
        "time, and `off` takes none",
    )
    neighbour: bool | Literal["auto"] = Field(
        default=False,
        description="whether each node copies its snapshots to the memory of another node, over "
        "the network. If a node is lost, the other one commits its part of the newest snapshot. "
        "`auto` does so whenever an attempt has several nodes. It takes up to four "
        "times the memory of a node's checkpoint files, besides the staging slots",
    )
    overlap: StrictBool = Field(
        default=False,
        json_schema_extra=_without_default,
        description="whether a save returns at once, and its copy continues while the next step "
        "computes, until an optimizer steps",
    )
    write_limit: Annotated[StrictInt, Field(ge=1)] | str | None = Field(
        default=None,
        description='most bytes per second that each node writes of a checkpoint, as `"200MB"` or '
        "a number. It limits how far training slows while a checkpoint is written. A save that "
        "training waits for is not limited, such as the last one before a stop",
    )
    staging: Literal["memory", "single", "disk"] = Field(
        default="memory",
        json_schema_extra=_without_default,
        description="where each rank stages a step before it is written. `memory` is two images "
        "of its part of the state in memory. `single` is one: the next save waits until the former "
        "one is written. `disk` is two files on the node's own disk, which need no memory",
    )
    staging_directory: str | None = Field(
        default=None,
        description='absolute path of a directory on each node\'s own disk for `staging = "disk"`. '
        "Default: the first of `$TMPDIR`, `/tmp` and `/var/tmp` on a disk",
    )

    @field_validator("interval")
    @classmethod
    def _interval_is_known(cls, value: int | str) -> int | str:
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"{value} steps: expected 1 or more")
        elif value != "auto" and not seconds_of(value):
            raise ValueError(
                f"{value!r}: expected steps (50), a time above 0 ('300s', '10m') or 'auto'"
            )
        return value

    @field_validator("budget")
    @classmethod
    def _budget_is_a_size(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not _size_bytes(value):
            raise ValueError(f"{value!r}: expected bytes, or a size such as '500GB' or '2TiB'")
        return value

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return _size_bytes(self.budget) if isinstance(self.budget, str) else self.budget

    @field_validator("write_limit")
    @classmethod
    def _write_limit_is_a_size(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not _size_bytes(value):
            raise ValueError(f"{value!r}: expected bytes per second, or a size such as '200MB'")
        return value

    @property
    def write_limit_bytes(self) -> int | None:
        """The limit in bytes per second."""
        given = self.write_limit
        return _size_bytes(given) if isinstance(given, str) else given

    @field_validator("mirror")
    @classmethod
    def _mirror_is_a_location(cls, value: str | None) -> str | None:
        if value is not None and (problem := problem_with_mirror(value)):
            raise ValueError(problem)
        return value

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r}: expected an absolute path, the same on all nodes")
        return value

    @model_validator(mode="after")
    def _local_needs_a_mirror(self) -> Checkpointing:
        if self.local is not None and not self.local.startswith("/"):
            raise ValueError(f"local {self.local!r}: expected an absolute path on the nodes")
        if self.local is not None and self.mirror is None:
            raise ValueError(
                "checkpoint.local is set without checkpoint.mirror: files on a node's disk are "
                "lost with the node; set checkpoint.mirror too"
            )
        return self

    @field_validator("staging_directory")
    @classmethod
    def _staging_directory_is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r}: expected an absolute path on the nodes")
        return value

    @property
    def interval_steps(self) -> int | None:
        """The interval in steps; None unless it was given in steps."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds; None unless it was given as a time."""
        return seconds_of(str(self.interval))


def write_limit(env: Mapping[str, str] = os.environ) -> int | None:
    """Return `checkpoint.write_limit` in bytes per second, as a node's processes have it.

    Raises `SpecError` if the environment variable is neither a number nor a size.
    """
    given = env.get(environment.CHECKPOINT_WRITE_LIMIT)
    if not given:
        return None
    found = _size_bytes(f"{given}B" if given.isascii() and given.isdecimal() else given)
    if not found:
        raise SpecError(
            f"{environment.CHECKPOINT_WRITE_LIMIT}={given!r}: expected bytes per second, or a size "
            "such as '200MB'"
        )
    return found


def doubling_steps(env: Mapping[str, str] = os.environ) -> int | None:
    """Return `checkpoint.doubling_steps`, as the ranks have it.

    Raises `SpecError` if the environment variable is not a number of steps.
    """
    given = env.get(environment.CHECKPOINT_DOUBLING_STEPS)
    if not given:
        return None
    is_count = given.isascii() and given.isdecimal() and len(given) <= len(str(STEP_MAX))
    if not is_count or not 0 < int(given) <= STEP_MAX:
        raise SpecError(
            f"{environment.CHECKPOINT_DOUBLING_STEPS}={given[:SHOWN_CHARACTERS]!r}: expected a "
            "number of steps, 1 or more"
        )
    return int(given)


def seconds_of(text: str) -> float | None:
    """Return a duration such as `10m` in seconds; None if invalid or longer than 30 years."""
    match = DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else inf
    return seconds if seconds <= SECONDS_MAX else None


def _size_bytes(text: str) -> int | None:
    """Return a size in bytes; None if invalid. `GB` is a power of 1000, `GiB` of 1024."""
    match = SIZE.fullmatch(text)
    if match is None:
        return None
    size = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return int(size) if size <= INTEGER_MAX else None
