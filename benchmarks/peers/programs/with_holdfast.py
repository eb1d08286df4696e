"""For Holdfast: a session that loads, saves and keeps snapshots according to the run's spec."""

import job as shared
import torch.distributed as dist

from holdfast.trainer import Session


def main() -> None:
    dist.init_process_group("gloo")
    job = shared.read_job()
    model, optimizer = shared.build(job)
    with (
        Session(model, optimizer, seed=1) as session,
        shared.open_record(job, session.rank) as record,
    ):
        for step in session.steps(job.steps):
            shared.train_step(job, model, optimizer, step)
            shared.note(record, step)
    dist.destroy_process_group()


main()
