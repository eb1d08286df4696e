"""What submitit runs in each task: interval checkpoints, and a requeue that begins from them."""

import job as shared
import submitit
import torch.distributed as dist


class Task:
    """Called in every task; `checkpoint` is what submitit calls at its signal, on rank 0."""

    def __call__(self) -> None:
        place = submitit.JobEnvironment()
        store = shared.Path(shared.read_job().folder) / f"store-{shared.os.environ['LAUNCH']}"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=place.global_rank,
            world_size=place.num_tasks,
        )
        shared.train_with_interval_checkpoints(shared.read_job())
        dist.destroy_process_group()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)
