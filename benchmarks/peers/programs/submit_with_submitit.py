"""Submits the task of `submitit_task` and prints the job id."""

import sys

import submitit
from submitit_task import Task

folder, grace_s = sys.argv[1], int(sys.argv[2])
executor = submitit.AutoExecutor(folder=f"{folder}/submitit", cluster="slurm")
executor.update_parameters(
    name="peers",
    timeout_min=60,
    nodes=1,
    tasks_per_node=2,
    slurm_partition="spot",
    slurm_signal_delay_s=grace_s,
    slurm_additional_parameters={"gres": "gpu:4", "requeue": True},
    slurm_setup=["export LAUNCH=${SLURM_RESTART_COUNT:-0}", "export OMP_NUM_THREADS=1"],
)
print(executor.submit(Task()).job_id)
