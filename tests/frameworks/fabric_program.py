"""A small program in the shape of Fabric's published examples, with and without Holdfast.

Each rank appends a line per batch to `notes-<rank>.jsonl` in its folder: the samples, the loss, the
learning rates and a digest of the random generators. The tests interrupt it where it calls `mark`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric as LightningFabric
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from holdfast.trainer.frameworks.lightning import Fabric, torchrun_size

SAMPLES = 44
WIDTH = 6
EPOCHS = 2
ACCUMULATE = 2
Mark = Callable[[str, int], None]
# "plain" accumulates. "folds" has two models, and two training passes in each epoch, over loaders
# that are made in it. "alone" is one rank, whose sampler has its own generator.
KINDS = ("plain", "folds", "alone")
AT_ONE_RANK = {"alone"}


class Samples(Dataset[Any]):
    """Samples with their numbers. Each fetch draws from all generators, and from its own."""

    def __init__(self) -> None:
        self._values = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
        self._own = random.Random(9)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.randn(WIDTH) + random.random() + np.random.rand() + self._own.random()
        return index, self._values[index] + noise


class Program:
    """One launch of the program on this rank."""

    def __init__(self, settings: dict[str, Any], mark: Mark) -> None:
        self.folder, self.kind = Path(settings["folder"]), settings["kind"]
        self._is_stock, self._mark = settings.get("stock", False), mark
        if self._is_stock:
            self.fabric: Any = LightningFabric(accelerator="cpu", **torchrun_size())
        else:
            self.fabric = Fabric(accelerator="cpu", session=settings["holdfast"])
        self.fabric.launch()
        self._batches = 0

    def train(self) -> None:
        folds = 2 if self.kind == "folds" else 1
        torch.manual_seed(7)
        parts = [self._model() for _ in range(folds)]
        loader = None if folds > 1 else self._loader()
        evaluation = self.fabric.setup_dataloaders(DataLoader(Samples(), batch_size=11))
        self.fabric.seed_everything(11 + self.fabric.global_rank, verbose=False)
        if not self._is_stock:
            self._batches = self.fabric.resume()
        for epoch in range(EPOCHS) if self._is_stock else self.fabric.epochs(EPOCHS):
            for fold, (model, optimizer, _) in enumerate(parts):
                self._pass(f"{epoch} {fold}", loader or self._loader(fold), model, optimizer)
                self._evaluate(f"{epoch} {fold}", model, evaluation)
            for _, _, scheduler in parts:
                scheduler.step()
        weights = [p.detach().numpy().tobytes() for model, *_ in parts for p in model.parameters()]
        self._note("end", weights=hashlib.sha256(b"".join(weights)).hexdigest())

    def _model(self) -> tuple[Any, Any, Any]:
        layers = torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = self.fabric.setup(model, optimizer)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def _loader(self, fold: int | None = None) -> Any:
        own = torch.Generator().manual_seed(3) if self.kind == "alone" else None
        if fold is None:
            loader = DataLoader(Samples(), batch_size=4, shuffle=True, generator=own)
        else:
            sampler = SubsetRandomSampler(range(fold, SAMPLES, 2))
            loader = DataLoader(Samples(), batch_size=4, sampler=sampler)
        return self.fabric.setup_dataloaders(loader)

    def _pass(self, place: str, loader: Any, model: Any, optimizer: Any) -> None:
        fabric = self.fabric
        model.train()
        first = 0 if self._is_stock else fabric.first_batch
        for number, (ids, values) in enumerate(loader, first):
            is_last = number + 1 == len(loader)
            accumulates = (number + 1) % ACCUMULATE != 0 and not is_last
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = model(values).square().mean()
                fabric.backward(loss)
            self._mark("batch", self._batches)
            self._batches += 1
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            rates = [group["lr"] for group in optimizer.param_groups]
            fabric.log("loss", loss)
            self._note(f"batch {place} {number}", ids=ids.tolist(), loss=loss.item(), rates=rates)

    @torch.no_grad()
    def _evaluate(self, place: str, model: Any, evaluation: Any) -> None:
        model.eval()
        total = sum(model(values).sum().item() for _, values in evaluation)
        self._mark("evaluation", self._batches)
        self._note(f"evaluation {place}", total=total)

    def _note(self, key: str, **facts: Any) -> None:
        with open(self.folder / f"notes-{self.fabric.global_rank}.jsonl", "a") as stream:
            stream.write(json.dumps([key, {**facts, "generators": generators_digest()}]) + "\n")


def generators_digest() -> str:
    numpy_state: Any = np.random.get_state()
    states = (random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist())
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def train(settings: dict[str, Any], mark: Mark) -> None:
    Program(settings, mark).train()
