"""The task that submitit runs: interval checkpoints, and a requeue that resumes from them."""

import os

import job as shared
import submitit
import torch.distributed as dist


class Task:
    """Called in every task. submitit calls `checkpoint` on rank 0 when it gets its signal."""

    def __call__(self) -> None:
        job, place = shared.read_job(), submitit.JobEnvironment()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/store-{place.job_id}-{os.environ['LAUNCH']}",
            rank=place.global_rank,
            world_size=place.num_tasks,
        )
        shared.train_with_interval_checkpoints(job)
        dist.destroy_process_group()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)
