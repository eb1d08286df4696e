"""`program` of a run spec: a program that writes its own checkpoints and resumes by itself."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.contracts.spec.part import SpecPart

STEP_FIELD: Final = "{step}"
STEP_GROUP: Final = "step"
_PROGRESS_EXAMPLE: Final = r"'step (?P<step>\d+)'"

ProgramSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "none"]


class Program(SpecPart):
    """A program that writes its own checkpoints, without a `Session`, and resumes by itself.

    Holdfast watches its checkpoints and records each complete one. It never changes them.
    """

    checkpoints: str = Field(
        default="",
        description="where the program writes its checkpoints: a path with `{step}` in its last "
        "part, such as `out/checkpoint-{step}`, or without it if each save overwrites the one "
        "before, such as `out/ckpt.pt`. A relative path starts at the working directory, and node "
        "0 must see it. Empty: the program uses a `Session`, or has no checkpoints",
    )
    complete: tuple[str, ...] = Field(
        default=(),
        description="files that a checkpoint's directory has only once it is complete, such as "
        '`["trainer_state.json"]`. Empty: it is complete when nothing in it changes any more',
    )
    settle_s: Annotated[float, Field(gt=0, le=86400)] = Field(
        default=5.0,
        description="seconds for which no file of a checkpoint may have changed before it counts "
        "as complete",
    )
    progress: str = Field(
        default="",
        description="regular expression with a group `step`, such as "
        r"`step (?P<step>\d+)`. Holdfast searches each line of rank 0's output for it. "
        "Empty: only checkpoints show progress",
    )
    signal: ProgramSignal = Field(
        default="SIGTERM",
        description="signal that tells the program to save and exit when the attempt must stop. "
        "`none`: it trains until the deadline, and is killed",
    )
    signal_to: Literal["main", "all"] = Field(
        default="main",
        description="processes that get the signal: `main` is each rank's own process, or that of "
        "the command without torchrun. `all` also includes the processes below them",
    )
    launcher: Literal["torchrun", "none"] = Field(
        default="torchrun",
        description="`none` runs `command` itself once on each node, as a command line without a "
        "shell. It finds the nodes in MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK",
    )

    @property
    def is_watched(self) -> bool:
        """True if the program writes checkpoints of its own that Holdfast watches."""
        return bool(self.checkpoints)

    @property
    def is_overwritten(self) -> bool:
        """True if each save of the program overwrites the checkpoint before it."""
        return self.is_watched and STEP_FIELD not in self.checkpoints

    @field_validator("checkpoints")
    @classmethod
    def _checkpoints_have_a_step(cls, value: str) -> str:
        folder, _, last = value.rpartition("/")
        is_valid = (
            last.count(STEP_FIELD) <= 1 and STEP_FIELD not in folder and last not in {"", "."}
        )
        if value and (not is_valid or ".." in value.split("/")):
            raise ValueError(
                f"{value!r}: expected a path without `..`. Its last part has {STEP_FIELD} once, "
                "such as 'out/checkpoint-{step}', or not at all if the program overwrites it, such "
                "as 'out/ckpt.pt'"
            )
        return value

    @field_validator("complete")
    @classmethod
    def _complete_names_files_inside(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(
                    f"{name!r}: expected the name of a file inside a checkpoint's directory, such "
                    "as 'trainer_state.json'"
                )
        return value

    @field_validator("progress")
    @classmethod
    def _progress_has_a_step(cls, value: str) -> str:
        try:
            groups = re.compile(value).groupindex
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{value!r}: not a regular expression: {error}; expected one such as "
                f"{_PROGRESS_EXAMPLE}"
            ) from error
        if value and STEP_GROUP not in groups:
            raise ValueError(
                f"{value!r}: has no group named 'step'; mark the number of the step, as in "
                f"{_PROGRESS_EXAMPLE}"
            )
        return value

    @model_validator(mode="after")
    def _complete_proves_something(self) -> Program:
        if self.complete and self.is_overwritten:
            raise ValueError(
                f"program.complete proves nothing for {self.checkpoints!r}, because its files are "
                "still there while the program overwrites them; leave it out, or let the program "
                "write each checkpoint to a path with {step}"
            )
        return self
