"""Lightning programs of several kinds, each written as its user would write it.

    torchrun --nproc-per-node 2 lightning_program.py '{"folder": "/path", "kind": "plain"}'

Each rank notes in the folder what it trained on, and what it saw. A key that is noted twice counts
once, with its last value: after a crash, steps run again. `mark` is called at the points of the
loop where a test may interrupt the program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.trainer.frameworks.lightning import Holdfast, torchrun_size

WIDTH: Final = 4
SAMPLES: Final = 24
BATCH: Final = 3
Mark = Callable[[str, int], None]


def sample(number: int) -> tuple[int, torch.Tensor]:
    return number, torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


class Table(Dataset[Any]):
    """Samples with an index. With `draws`, each fetch draws from its own generator."""

    def __init__(self, samples: int, *, draws: bool = False) -> None:
        self.samples = samples
        self._own = np.random.default_rng(5) if draws else None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        index, value = sample(number)
        return index, value if self._own is None else value + self._own.normal()


class Stream(IterableDataset[Any]):
    """Samples of one rank in an order of their own, without a length."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank = int(os.environ.get("RANK", "0"))
        return (sample(100 * rank + number) for number in range(SAMPLES // 2))


class Notes:
    """What one rank notes in the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"notes-{os.environ.get('RANK', '0')}.jsonl"

    def __call__(self, key: str, **facts: Any) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps([key, facts]) + "\n")


class Model(L.LightningModule):
    """A small regression with dropout, so that random states matter."""

    def __init__(self, notes: Notes, sleep_s: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self.error = torchmetrics.MeanSquaredError()
        self._notes, self._sleep_s = notes, sleep_s

    def loss_of(self, batch: Any) -> torch.Tensor:
        _, inputs = batch
        loss: torch.Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return loss

    def note_step(self, batch: Any, number: int, loss: torch.Tensor) -> None:
        rates = [o.param_groups[0]["lr"] for o in self.trainer.optimizers]
        self._notes(
            f"batch {self.trainer.fit_loop.total_batch_idx}",
            ids=batch[0].tolist(),
            number=number,
            epoch=self.current_epoch,
            loss=loss.item(),
            rates=rates,
        )
        time.sleep(self._sleep_s)

    def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.error(self.net(batch[1]).detach(), batch[1].sum(1, keepdim=True))
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        self.note_step(batch, number, loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            value = self.trainer.callback_metrics["val_loss"].item()
            self._notes(f"evaluation {self.trainer.fit_loop.total_batch_idx}", value=value)

    def on_train_epoch_start(self) -> None:
        self._notes(f"start {self.current_epoch}", drawn=torch.rand(()).item())

    def on_train_epoch_end(self) -> None:
        seen = {key: value.item() for key, value in self.trainer.callback_metrics.items()}
        self._notes(f"epoch {self.current_epoch}", **seen)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        by_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_loss, "interval": "epoch", "monitor": "val_loss"},
        ]


class Adversaries(Model):
    """Manual optimization with two optimizers, which step in turn."""

    def __init__(self, notes: Notes, sleep_s: float) -> None:
        super().__init__(notes, sleep_s)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss_of(batch)
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)
        self.note_step(batch, number, loss)

    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        return [
            torch.optim.Adam(first.parameters(), lr=0.01),
            torch.optim.SGD(last.parameters(), lr=0.01),
        ]


class Sharded(Model):
    """FSDP2, as `ModelParallelStrategy` asks for it."""

    def configure_model(self) -> None:
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Average(WeightAveraging):
    """An EMA of the weights."""

    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.9))  # type: ignore[no-untyped-call]


class Marks(L.Callback):
    """Calls `mark` inside a step, and inside an evaluation."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._mark("batch", trainer.fit_loop.total_batch_idx)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._mark("evaluation", trainer.fit_loop.total_batch_idx)


def others() -> list[L.Callback]:
    """Lightning's own callbacks that a resume continues, and that nothing else here has."""
    return [
        GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        LearningRateMonitor(),
        DeviceStatsMonitor(cpu_stats=True),
        Timer(),
    ]


# Kind → further arguments of the trainer.
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {"max_epochs": 2},
    "often": {"max_steps": 7, "accumulate_grad_batches": 3, "val_check_interval": 0.5},
    "workers": {"max_epochs": 2},
    "stateful": {"max_epochs": 2},
    "stateful_alone": {"max_epochs": 2, "strategy": "auto"},
    "stream": {"max_epochs": 2, "val_check_interval": 2},
    "stateful_stream": {"max_epochs": 2, "val_check_interval": 2},
    "several": {"max_epochs": 2},
    "several_alone": {"max_epochs": 2, "strategy": "auto"},
    "accumulating": {"max_epochs": 3, "strategy": "auto"},
    "generator": {"max_epochs": 2, "strategy": "auto"},
    "average": {"max_epochs": 2},
    "manual": {"max_epochs": 2},
    "sharded": {"max_epochs": 2},
}

# Lightning puts its DistributedSampler into the loaders of the other kinds.
AT_ONE_RANK: Final = ("generator", "stateful_alone", "several_alone", "accumulating")


def loader_of(kind: str) -> Any:
    """The training loader of a kind."""
    # Workers draw in processes of their own.
    table = Table(SAMPLES, draws=kind != "workers")
    if kind == "workers":
        return DataLoader(table, BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    if kind in ("stateful", "stateful_alone"):
        return StatefulDataLoader(table, BATCH, shuffle=True)
    if kind == "stream":
        return DataLoader(Stream(), BATCH)
    if kind == "stateful_stream":
        return StatefulDataLoader(Stream(), BATCH)
    if kind in ("several", "several_alone"):
        return [DataLoader(table, BATCH, shuffle=True), DataLoader(Table(9), 2, shuffle=True)]
    if kind == "generator":
        return DataLoader(table, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    return DataLoader(table, BATCH, shuffle=True)


class Several(Model):
    """Takes a batch of each of two loaders."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
        pairs = zip(*batch, strict=True)
        return super().training_step([torch.cat(pair) for pair in pairs], number)


def train(settings: Mapping[str, Any], mark: Mark = lambda place, at: None) -> None:
    """Train as `settings` say: `folder`, `kind`, and further arguments of the callback."""
    folder, kind = Path(settings["folder"]), settings["kind"]
    notes = Notes(folder)
    L.seed_everything(7, verbose=False)
    kinds = {"manual": Adversaries, "several": Several, "sharded": Sharded}
    kinds["several_alone"] = Several
    # Steps sleep, unless the file `hurry` exists at the start.
    must_hurry = os.path.exists(settings.get("hurry", ""))
    model = kinds.get(kind, Model)(notes, 0.0 if must_hurry else settings.get("sleep_s", 0.0))
    strategy: Any = "ddp"
    if kind == "sharded":
        size = torchrun_size()["devices"]
        strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    trainer = L.Trainer(
        **{
            "strategy": strategy,
            **torchrun_size(),
            **KINDS[kind],
            **settings.get("trainer", {}),
        },
        accelerator="cpu",
        callbacks=[
            Holdfast(**settings.get("holdfast", {})),
            best,
            EarlyStopping("val_loss", patience=9),
            Marks(mark),
            *([Average()] if kind == "average" else []),
            *(others() if kind == "accumulating" else []),
        ],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader_of(kind), DataLoader(Table(8), 2), ckpt_path=settings.get("start"))
    notes(
        "end",
        steps=trainer.global_step,
        weights=[p.sum().item() for p in model.parameters()],
        drawn=torch.rand(()).item(),
        best=os.path.relpath(best.best_model_path, best.dirpath),
        score=best.best_model_score.item(),
        # Only rank 0 deletes files.
        files=sorted(os.listdir(best.dirpath)) if trainer.is_global_zero else [],
    )


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
