"""For dlrover-run: flash checkpoints to memory, and at longer intervals to disk."""

import job as shared
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


def main() -> None:
    dist.init_process_group("gloo")
    job = shared.read_job()
    model, optimizer = shared.build(job)
    checkpointer = DdpCheckpointer(str(job.checkpoints))
    state = checkpointer.load_checkpoint()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    first = (state["step"] if state else 0) + 1
    with shared.open_record(job, dist.get_rank()) as record:
        for step in range(first, job.steps + 1):
            shared.train_step(job, model, optimizer, step)
            shared.note(record, step)
            if step % job.snapshot_steps == 0 or step % job.save_steps == 0:
                kind = StorageType.MEMORY if step % job.save_steps else StorageType.DISK
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpointer.save_checkpoint(step, {**parts, "step": step}, storage_type=kind)
    dist.destroy_process_group()


main()
