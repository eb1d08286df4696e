"""`on` of a run spec: consumers, which are programs that use a committed checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from holdfast.contracts import environment
from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.spec.slurm_options import JobOptions

CONSUMERS_MAX: Final = 16
# The parameters that a deployment's flow gets if it has them, each from a variable of the consumer.
OFFERED: Final[Mapping[str, str]] = {
    "checkpoint": environment.CHECKPOINT,
    "checkpoint_path": environment.CHECKPOINT_PATH,
    "checkpoint_step": environment.CHECKPOINT_STEP,
    "metrics_file": environment.METRICS_FILE,
}
Trigger = Literal["commit", "pin", "best", "preemption", "end"]
ExportKind = Literal["torch", "safetensors", "hf", "dcp"]


class ConsumerJob(SpecPart):
    """A job of the consumer on Slurm, on one node."""

    gpus: Annotated[int, Field(ge=0, le=64)] = Field(default=1, description="GPUs of the job")
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="CPU cores of the job. None: Slurm's default"
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="memory of the job, in GB. None: Slurm's default"
    )
    partition: str | None = Field(default=None, description="Slurm partition. None: the run's")
    account: str | None = Field(default=None, description="Slurm account. None: the run's")
    qos: str | None = Field(default=None, description="Slurm QOS. None: the run's")
    extra: JobOptions = Field(
        default_factory=dict,
        description="further sbatch options by their long names. They are added to "
        "`resources.extra`, and have precedence",
    )


class Consumer(SpecPart):
    """What Holdfast starts for a committed checkpoint, such as an evaluation.

    It gets the checkpoint's path in the environment. Its failure never concerns the training.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = Field(
        description="name of the consumer, which is unique in the spec"
    )
    event: Trigger = Field(
        default="commit",
        description="what it is started for: each `commit`, each `pin`, a new `best` checkpoint by "
        "`checkpoint.keep.best`, the newest checkpoint after a `preemption`, or that at the `end` "
        "of the run",
    )
    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="with `commit`: only the first checkpoint at or after each multiple of this "
        "many steps",
    )
    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="the program and its arguments, in the working directory and environment of "
        "the run",
    )
    deployment: Annotated[str, Field(pattern=r"^[^/]{1,200}/[^/]{1,200}$")] | None = Field(
        default=None,
        description="instead of `command`: a deployment of Prefect, as `FLOW/NAME`. The flow gets "
        "those of the parameters `checkpoint`, `checkpoint_path`, `checkpoint_step` and "
        "`metrics_file` that it has",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="further parameters of the deployment's flow, with other names",
    )
    job: ConsumerJob | None = Field(
        default=None,
        description="run the command in a Slurm job with these resources. None: on the "
        "supervisor's machine",
    )
    export: ExportKind | None = Field(
        default=None,
        description="give the command an export of the checkpoint in this format, which is deleted "
        "afterwards. None: the checkpoint itself",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2,
        description="further tries after a failure or a time limit. A job that Slurm preempted is "
        "tried again in any case",
    )
    timeout_min: Annotated[float, Field(gt=0, le=60 * 24 * 30)] = Field(
        default=60.0, description="minutes after which the command is killed, and has failed"
    )

    @model_validator(mode="after")
    def _steps_belong_to_commits(self) -> Consumer:
        if self.every_steps is not None and self.event != "commit":
            raise ValueError(
                f"on {self.name!r}: every_steps acts only with event = 'commit', and the event is "
                f"{self.event!r}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_thing_is_started(self) -> Consumer:
        if (self.command is None) == (self.deployment is None):
            what = "neither" if self.command is None else "both"
            raise ValueError(
                f"on {self.name!r}: {what} of command and deployment, expected one of them"
            )
        if self.deployment is not None and self.job is not None:
            raise ValueError(
                f"on {self.name!r}: job and deployment: the work pool of the deployment says where "
                "it runs; leave job out"
            )
        if self.deployment is None and self.parameters:
            raise ValueError(
                f"on {self.name!r}: parameters act only with deployment; a command gets arguments"
            )
        return self


def problem_with_names(consumers: tuple[Consumer, ...]) -> str | None:
    """Return the problem with two consumers of one name as text, or None."""
    twice = [name for name, count in Counter(one.name for one in consumers).items() if count > 1]
    if not twice:
        return None
    return f"two consumers have the name {twice[0]!r}; give each its own name"
