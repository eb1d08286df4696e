"""A small program in the shape of Accelerate's published examples, with settings in one argument.

Each rank appends a line per batch to `records/rank<r>.jsonl` in its run's folder: the samples, the
loss, the learning rate and a digest of the random generators. With `kill_at` (an optimizer step)
rank 0 kills itself once in the middle of that step; with `stop_at` it asks for a stop. Batches take
`sleep_s` seconds until the file `hurry` exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.stops import hold_until_agreed

from holdfast.trainer.frameworks.accelerate import Accelerator

SAMPLES = 60
WIDTH = 8


class Samples(Dataset[Any]):
    """Samples with their numbers. With `noise`, a fetch draws from all generators, and its own."""

    def __init__(self, *, noise: bool) -> None:
        self._values = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
        self._noise, self._own = noise, torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        value = self._values[index]
        if self._noise:
            value = value + torch.randn(WIDTH) + random.random() + np.random.rand()
            value = value + torch.randn(WIDTH, generator=self._own)
        return index, value


class Average:
    """An object of the program's own, registered for checkpointing."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def main() -> None:
    settings = json.loads(sys.argv[1])
    accelerator = make_accelerator(settings)
    set_seed(7, device_specific=True)
    samples, workers = Samples(noise=settings.get("noise", False)), settings.get("workers", 0)
    loader = DataLoader(samples, batch_size=4, shuffle=True, num_workers=workers)
    evaluation = DataLoader(Samples(noise=False), batch_size=10)
    set_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    average = Average()
    accelerator.register_for_checkpointing(average)
    set_seed(11 + accelerator.process_index)
    start, skip = 0, None
    if settings.get("load"):
        accelerator.load_state(settings["load"])
        start, skip = settings.get("start", [0, None])
    overall_step = accelerator.resume()
    local = model.no_sync() if settings.get("local_sgd") else contextlib.nullcontext()
    local.__enter__()  # As Accelerate's `LocalSGD` does.
    record = Record(accelerator)
    for epoch in accelerator.epochs(settings["epochs"], start):
        model.train()
        active, total_loss = loader, accelerator.epoch_total()
        if skip is not None and epoch == start:
            active = accelerator.skip_first_batches(loader, skip)
        for step, (ids, values) in enumerate(active, accelerator.first_batch):
            with accelerator.accumulate(model):
                loss = model(values).square().mean()
                accelerator.backward(loss)
                interrupt(settings, accelerator)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            total_loss += loss.detach()
            # Accelerate keeps one state of an object for all ranks.
            average.add(accelerator.reduce(loss.detach(), "mean").item())
            record.write(
                key=[epoch, step],
                overall=overall_step,
                step=accelerator.session.step + bool(accelerator.sync_gradients),
                ids=ids.tolist(),
                loss=loss.item(),
                lr=scheduler.get_last_lr(),
                average=average.value,
                scale=accelerator.scaler.get_scale() if accelerator.scaler else None,
                generators=generators_digest(),
            )
            accelerator.log({"loss": loss.item()}, step=overall_step)
            if not os.path.exists(settings.get("hurry", "")):
                time.sleep(settings.get("sleep_s", 0.0))
            if settings.get("save_every") and overall_step % settings["save_every"] == 0:
                accelerator.save_state(folder(settings, f"step_{overall_step}"))
        model.eval()
        with torch.no_grad():
            total = sum(model(values).sum().item() for _, values in evaluation)
        sums = [total, total_loss.item()]
        accelerator.log({"total": total}, step=overall_step)
        record.write(key=[epoch, "end"], sums=sums, generators=generators_digest())
        if settings.get("save_epochs"):
            accelerator.save_state(folder(settings, f"epoch_{epoch}"))
    record.write(key=["end"], overall=overall_step, weights=weights_digest(model))
    accelerator.end_training()


def make_accelerator(settings: dict[str, Any]) -> Accelerator:
    configuration = ProjectConfiguration(**settings.get("project", {}))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=settings.get("accumulate", 1),
        dataloader_config=DataLoaderConfiguration(**settings.get("data", {})),
        project_config=configuration,
        kwargs_handlers=[hook] if settings.get("power_sgd") else [],
        session={"interval": settings.get("interval", 1000), **settings.get("session", {})},
    )
    if settings.get("scaler"):
        # Accelerate makes one for fp16, which no CPU supports.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    if settings.get("fsdp"):
        # Accelerate chooses FSDP2 only on GPUs. Its code for it runs on CPUs, too.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        assert accelerator.is_fsdp2
    return accelerator


def folder(settings: dict[str, Any], name: str) -> str | None:
    """The argument of `save_state`: none with automatic naming."""
    if settings.get("project", {}).get("automatic_checkpoint_naming"):
        return None
    return str(Path(settings["output"]) / name)


def interrupt(settings: dict[str, Any], accelerator: Accelerator) -> None:
    """Interrupt the run once, in the middle of an optimizer step."""
    if not accelerator.sync_gradients:
        return
    directory, step = accelerator.session.run_directory, accelerator.session.step + 1
    for kind in ("kill_at", "stop_at"):
        marker = directory / f"{kind}-{settings.get(kind)}"
        if settings.get(kind) != step or marker.exists():
            continue
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            marker.touch()
            # SIGTERM sets a flag on a rank without an agent; all ranks then agree on a step.
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill_at" else signal.SIGTERM)
            hold_until_agreed()
        accelerator.wait_for_everyone()


class Record:
    """This rank's lines."""

    def __init__(self, accelerator: Accelerator) -> None:
        directory = accelerator.session.run_directory / "records"
        directory.mkdir(parents=True, exist_ok=True)
        self._ranks = accelerator.num_processes
        self._path = directory / f"rank{accelerator.process_index}.jsonl"

    def write(self, **line: Any) -> None:
        with open(self._path, "a") as stream:
            stream.write(json.dumps({"ranks": self._ranks, **line}) + "\n")


def generators_digest() -> str:
    numpy_state: Any = np.random.get_state()
    states = (random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist())
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def weights_digest(model: torch.nn.Module) -> str:
    """A digest of all weights; sharded ones are gathered."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
