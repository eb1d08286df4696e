"""An autoencoder trained with Lightning, with the lines that make it fault tolerant.

torchrun --nproc-per-node 2 examples/lightning/train.py

It has the parts of Lightning's introduction to `Trainer`: a module, two loaders, `fit` and `test`.
The pictures are made here, so that nothing is downloaded.
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.trainer.frameworks.lightning import Holdfast, torchrun_size  # + holdfast

SIDE = 8


def make_pictures(count: int, seed: int) -> TensorDataset:
    """Pictures of one bright square on a dark ground, float32 of shape (count, SIDE * SIDE)."""
    draw = torch.Generator().manual_seed(seed)
    at = torch.randint(0, SIDE - 2, (count, 2), generator=draw)
    rows = torch.arange(SIDE)
    inside = (rows >= at[..., None]) & (rows < at[..., None] + 3)
    return TensorDataset((inside[:, 0, :, None] & inside[:, 1, None, :]).float().flatten(1))


class AutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, SIDE * SIDE))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(pictures))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(0)
model = AutoEncoder()
trainer = L.Trainer(
    **torchrun_size(),  # + holdfast: the number of ranks is that of torchrun
    accelerator="cpu",
    strategy="ddp",
    max_epochs=4,
    log_every_n_steps=10,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True), Holdfast()],  # + holdfast
)
trainer.fit(
    model,
    DataLoader(make_pictures(2048, 1), batch_size=16, shuffle=True),
    DataLoader(make_pictures(256, 2), batch_size=16),
)
trainer.test(model, DataLoader(make_pictures(256, 3), batch_size=16), ckpt_path="best")
