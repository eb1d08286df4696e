"""For Lightning under srun: its own Slurm requeue and its interval checkpoints."""

from __future__ import annotations

import os
import signal
from typing import Any

import job as shared
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment


class Module(L.LightningModule):
    """The shared model as a Lightning module."""

    def __init__(self, job: shared.Job) -> None:
        super().__init__()
        self.job = job
        self.model, self.optimizer = shared.build(job)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def training_step(self, inputs: torch.Tensor, _index: int) -> torch.Tensor:
        return (self.model(inputs) - inputs).square().mean()


class Recorder(Callback):
    """Makes each step as long as required, and records it."""

    def __init__(self, job: shared.Job) -> None:
        self.job = job
        self.record = shared.open_record(job, int(os.environ["SLURM_PROCID"]))

    def on_train_batch_end(self, trainer: L.Trainer, *_arguments: Any) -> None:
        shared.time.sleep(self.job.step_s)
        shared.note(self.record, trainer.global_step)


def main() -> None:
    job = shared.read_job()
    steps = range(1, 1 + job.steps * 2)
    data = torch.stack([shared.inputs_of(job, step)[0] for step in steps])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=job.steps,
        default_root_dir=job.folder,
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        callbacks=[
            Recorder(job),
            ModelCheckpoint(
                dirpath=job.checkpoints, every_n_train_steps=job.save_steps, save_last=True
            ),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=1)
    # Lightning looks for the requeue's checkpoint only if no other one is requested.
    is_requeued = any(shared.Path(job.folder).glob("hpc_ckpt_*"))
    trainer.fit(Module(job), loader, ckpt_path=None if is_requeued else "last")


main()
