"""The settings of a work pool of the type `holdfast`."""

from __future__ import annotations

import shlex
from typing import Literal

from prefect.workers.base import BaseJobConfiguration, BaseVariables
from pydantic import Field


class HoldfastConfiguration(BaseJobConfiguration):
    """What one flow run's place is made of."""

    place: Literal["process", "slurm"] = Field(default="process")
    partition: str | None = Field(default=None)
    account: str | None = Field(default=None)
    qos: str | None = Field(default=None)
    time_limit_min: int = Field(default=10_080)
    memory_mb: int = Field(default=1024)
    sbatch: str | None = Field(default=None)
    working_dir: str | None = Field(default=None)

    @property
    def options(self) -> list[str]:
        """The options of sbatch."""
        given = {"partition": self.partition, "account": self.account, "qos": self.qos}
        chosen = [f"--{name}={value}" for name, value in given.items() if value]
        limits = [f"--time={self.time_limit_min}", f"--mem={self.memory_mb}M"]
        return [*chosen, *limits, *shlex.split(self.sbatch or "")]


class HoldfastVariables(BaseVariables):
    """The variables of a work pool, with their descriptions in Prefect's UI."""

    place: Literal["process", "slurm"] = Field(
        default="process",
        description="Where flows run: processes on the worker's host, or a Slurm job for each.",
    )
    partition: str | None = Field(
        default=None, description="Partition of the flows' Slurm jobs. One that is not preempted."
    )
    account: str | None = Field(default=None, description="Slurm account of these jobs.")
    qos: str | None = Field(default=None, description="Slurm QOS of these jobs.")
    time_limit_min: int = Field(
        default=10_080,
        gt=0,
        description="Time limit of these jobs in minutes. The worker then submits the next one.",
    )
    memory_mb: int = Field(default=1024, gt=0, description="Memory of these jobs in MB.")
    sbatch: str | None = Field(default=None, description="Further options of sbatch.")
    working_dir: str | None = Field(
        default=None, description="Working directory of flows. Default: the worker's."
    )
