"""Trains on a stream with one of the frameworks, and notes which samples each step got.

    torchrun stream_program.py SETTINGS

SETTINGS is JSON: `framework`, `directory`, `data` with the files of `tests.process.stream_program`,
`source` and `workers`. The stops and kills, and the lines that it notes, are those of that program.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from tests.process.stream_program import (
    EPOCHS,
    SIZES,
    disturb,
    import_streaming,
    noisy,
    note,
    source_of,
    streaming_dataset,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from holdfast.trainer.streams import StreamDataset, TextLines

# Of each of two ranks.
BATCH: Final = 3
SAMPLES: Final = sum(SIZES)
MAX_STEPS: Final = 25


class Named(IterableDataset[Any]):
    """A program's own stream that names its shards."""

    def __init__(self, folder: Path) -> None:
        self._lines = TextLines(sorted(map(str, folder.glob("*.jsonl"))), json.loads)

    def __iter__(self) -> Iterator[Any]:
        for shard in self.shards():
            yield from (sample for sample, _ in self.open(shard, None))

    def shards(self) -> Any:
        return self._lines.shards()

    def open(self, shard: str, position: Any) -> Iterator[Any]:
        return ((noisy(sample), at) for sample, at in self._lines.open(shard, position))


def stream_of(kind: str, folder: Path) -> IterableDataset[Any]:
    """Return the dataset that the program gives to its framework."""
    if kind == "named":
        return Named(folder)
    if kind == "streaming":
        found: IterableDataset[Any] = noisy_streaming(folder)
        return found
    source, options = source_of(kind, folder, None)
    return StreamDataset(source, **options) if kind == "lines" else source


def noisy_streaming(folder: Path) -> Any:
    """Return a `StreamingDataset` that adds random numbers. Its loader has the batch size."""
    base: Any = import_streaming().StreamingDataset

    class Noisy(base):
        def __getitem__(self, at: int) -> Any:
            return noisy(super().__getitem__(at))

    return streaming_dataset(folder, Noisy, batch_size=None)


def collate(samples: list[Any]) -> Any:
    """Make a batch, with random numbers of the three generators, as a masking collator does."""
    found = default_collate(samples)
    found["mask"] = torch.rand(len(samples)) + random.random() + np.random.rand()
    return found


class Model(torch.nn.Module):
    """A layer with dropout. Its result is what a Transformers trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(3, 1), torch.nn.Dropout(0.3)

    def forward(self, id: Any, noise: Any, mask: Any) -> dict[str, Any]:
        found = torch.stack([id / 1000, noise, mask], dim=1).float()
        return {"loss": (self.dropout(self.layer(found)) ** 2).mean()}


class Notes:
    """This rank's lines."""

    def __init__(self, settings: dict[str, Any], rank: int, ranks: int) -> None:
        self._directory, self._rank, self._ranks = settings["directory"], rank, ranks

    def batch(self, step: int, epoch: int, batch: Any, loss: Any, **more: Any) -> None:
        """Note a batch of optimizer step `step`, from 1, and disturb this launch if it is due."""
        disturb(step, self._rank)
        line: dict[str, Any] = {"step": step, "epoch": epoch, "world": self._ranks, **more}
        line |= {name: batch[name].tolist() for name in ("noise", "mask")}
        line |= {"ids": batch["id"].tolist(), "loss": loss.item()}
        draws = [random.random(), torch.rand(()).item()]
        note(self._directory, self._rank, **line, draws=draws)


def with_transformers(settings: dict[str, Any]) -> None:
    from transformers import TrainingArguments

    from holdfast.trainer.frameworks.transformers import Trainer

    class Noting(Trainer):
        session_options: ClassVar[Any] = {"directory": settings["directory"]}

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *given, **more)
            place = self._holdfast.progress.place
            notes.batch(self.state.global_step + 1, place.epoch, inputs, loss)
            return loss

    accumulation = settings.get("accumulation", 1)
    arguments = TrainingArguments(
        output_dir=str(Path(settings["directory"]).with_name("out")),
        use_cpu=True,
        max_steps=settings.get("max_steps", MAX_STEPS),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.1,
        logging_steps=4,
        save_strategy=settings.get("save", "no"),
        remove_unused_columns=False,
        dataloader_num_workers=settings["workers"],
        dataloader_prefetch_factor=3 if settings["workers"] else None,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        seed=7,
    )
    data = stream_of(settings["source"], Path(settings["data"]))
    notes = Notes(settings, arguments.process_index, arguments.world_size)
    Noting(model=Model(), args=arguments, train_dataset=data, data_collator=collate).train()


def loader_of(settings: dict[str, Any], batch: int) -> DataLoader[Any]:
    data = stream_of(settings["source"], Path(settings["data"]))
    return DataLoader(data, batch_size=batch, num_workers=settings["workers"], collate_fn=collate)


def with_accelerate(settings: dict[str, Any]) -> None:
    from accelerate.utils import DataLoaderConfiguration

    from holdfast.trainer.frameworks.accelerate import Accelerator

    accumulation = settings.get("accumulation", 1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(**settings.get("config", {})),
        session={"directory": settings["directory"], "seed": 5},
    )
    notes = Notes(settings, accelerator.process_index, accelerator.num_processes)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = settings.get("batch", BATCH)
    parts = (loader_of(settings, batch), loader_of({**settings, "workers": 0}, batch))
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, *parts)
    for epoch in accelerator.epochs(EPOCHS):
        model.train()
        for number, inputs in enumerate(loader, accelerator.first_batch):
            with accelerator.accumulate(model):
                loss = model(**inputs)["loss"]
                accelerator.backward(loss)
                step = accelerator.session.step + 1
                notes.batch(step, epoch, inputs, loss, number=number)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen = [len(set(inputs["id"].tolist())) for inputs in evaluation]
        # This rank's part of all samples, from the first one on.
        assert sum(seen) >= SAMPLES // accelerator.num_processes // 2, seen
    accelerator.end_training()


def with_fabric(settings: dict[str, Any]) -> None:
    from holdfast.trainer.frameworks.lightning import Fabric

    fabric = Fabric(accelerator="cpu", session={"directory": settings["directory"], "seed": 5})
    notes = Notes(settings, fabric.global_rank, fabric.world_size)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    # A loader of an evaluation counts its batches in another unit than that of the stream.
    fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    loader = fabric.setup_dataloaders(loader_of(settings, BATCH))
    for epoch in fabric.epochs(EPOCHS):
        for number, inputs in enumerate(loader, fabric.first_batch):
            loss = model(**inputs)["loss"]
            fabric.backward(loss)
            notes.batch(fabric.session.step + 1, epoch, inputs, loss, number=number)
            optimizer.step()
            optimizer.zero_grad()


def with_lightning(settings: dict[str, Any]) -> None:
    import lightning as L

    from holdfast.trainer.frameworks.lightning import Holdfast, torchrun_size

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.model(**batch)["loss"]
            session = self.trainer.fit_loop.holdfast._opened
            notes.batch(session.step + 1, self.current_epoch, batch, loss, number=number)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        **torchrun_size(),
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[Holdfast(directory=settings["directory"])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    notes = Notes(settings, trainer.global_rank, trainer.world_size)
    trainer.fit(Module(), loader_of(settings, BATCH))


FRAMEWORKS: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "lightning": with_lightning,
    "transformers": with_transformers,
}


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    settings = json.loads(sys.argv[1])
    FRAMEWORKS[settings["framework"]](settings)


if __name__ == "__main__":
    main()
