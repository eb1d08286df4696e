"""A small program for each framework, with Holdfast and without. `launch` starts one of them.

A program differs between the two kinds only in what the framework's guide in `docs/` changes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.optim import AdamW
from torch.utils.data import DataLoader

from holdfast_bench.frameworks.steps import Model, Rows, Settings, write_result

# Holdfast saves only when the framework does.
SESSION: Final[dict[str, Any]] = {"interval": 1_000_000}
LEARNING_RATE: Final = 1e-4


def transformers(settings: Settings) -> Model:
    from transformers import Trainer, TrainingArguments

    made = Trainer
    if settings.has_holdfast:
        from holdfast.trainer.frameworks.transformers import Trainer as HoldfastTrainer

        HoldfastTrainer.session_options = session(settings) | {"snapshots": "off"}
        made = HoldfastTrainer
    model = Model(settings)
    arguments = TrainingArguments(
        output_dir=str(settings.folder / "output"),
        max_steps=settings.steps,
        per_device_train_batch_size=1,
        learning_rate=LEARNING_RATE,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    made(model=model, args=arguments, train_dataset=Rows(settings, ranks())).train()
    return model


def accelerate(settings: Settings) -> Model:
    from accelerate import Accelerator

    if settings.has_holdfast:
        from holdfast.trainer.frameworks.accelerate import Accelerator as HoldfastAccelerator

        options = session(settings) | {"snapshots": "off"}
        accelerator: Any = HoldfastAccelerator(cpu=True, session=options)
    else:
        accelerator = Accelerator(cpu=True)
    bare = Model(settings)
    model, optimizer, loader = accelerator.prepare(
        bare,
        AdamW(bare.parameters(), lr=LEARNING_RATE),
        DataLoader(Rows(settings, ranks()), batch_size=1),
    )
    step = accelerator.resume() if settings.has_holdfast else 0
    for _ in accelerator.epochs(1) if settings.has_holdfast else range(1):
        for batch in loader:
            accelerator.backward(model(batch["inputs"])["loss"])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if settings.save_every and step % settings.save_every == 0:
                accelerator.save_state(str(settings.folder / f"step_{step}"))
    accelerator.end_training()
    return bare


def lightning(settings: Settings) -> Model:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(settings)

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            return self.model(batch["inputs"])["loss"]

        def configure_optimizers(self) -> AdamW:
            return AdamW(self.parameters(), lr=LEARNING_RATE)

    callbacks: list[Any] = []
    if settings.save_every:
        callbacks += [
            ModelCheckpoint(
                str(settings.folder / "output"),
                every_n_train_steps=settings.save_every,
                save_top_k=-1,
            )
        ]
    if settings.has_holdfast:
        from holdfast.trainer.frameworks.lightning import Holdfast

        # A step that `ModelCheckpoint` saves also gets a checkpoint of Holdfast.
        options = session(settings) | (
            {"interval": settings.save_every} if settings.save_every else {}
        )
        callbacks += [Holdfast(**options, snapshots="off")]
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks(),
        strategy="ddp",
        max_steps=settings.steps,
        logger=False,
        enable_checkpointing=bool(settings.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=str(settings.folder),
    )
    trainer.fit(module, DataLoader(Rows(settings, ranks()), batch_size=1))
    return module.model


def fabric(settings: Settings) -> Model:
    from lightning.fabric import Fabric

    made: Any = None
    if settings.has_holdfast:
        from holdfast.trainer.frameworks.lightning import Fabric as HoldfastFabric

        # Holdfast's checkpoints take the place of the program's own.
        options = session(settings) | (
            {"interval": settings.save_every} if settings.save_every else {}
        )
        made = HoldfastFabric(
            accelerator="cpu", strategy="ddp", session=options | {"snapshots": "off"}
        )
    one = made or Fabric(accelerator="cpu", devices=ranks(), strategy="ddp")
    one.launch()
    bare = Model(settings)
    model, optimizer = one.setup(bare, AdamW(bare.parameters(), lr=LEARNING_RATE))
    loader = one.setup_dataloaders(DataLoader(Rows(settings, ranks()), batch_size=1))
    for _ in range(1) if made is None else made.epochs(1):
        for step, batch in enumerate(loader, 1):
            one.backward(model(batch["inputs"])["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if made is None and settings.save_every and step % settings.save_every == 0:
                one.save(settings.folder / f"{step}.ckpt", {"model": model, "optimizer": optimizer})
    return bare


def deepspeed(settings: Settings) -> Model:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # On the CPU, DeepSpeed compiles operations when it starts, if it finds a compiler.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    model = Model(settings)
    optimizer = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Rows(settings, ranks()),
        config={
            "train_batch_size": ranks(),
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": optimizer,
            "zero_optimization": {"stage": 2},
        },
    )
    made: Any = None
    if settings.has_holdfast:
        from holdfast.trainer.frameworks.deepspeed import DeepSpeedSession

        made = DeepSpeedSession(engine, **session(settings))
    batches = loader if made is None else made.batches(loader)
    for _ in range(1) if made is None else made.epochs(1):
        for batch in batches:
            engine.backward(engine(batch["inputs"])["loss"])
            engine.step()
            if settings.save_every and engine.global_steps % settings.save_every == 0:
                if made is None:
                    engine.save_checkpoint(str(settings.folder / "output"))
                else:
                    made.checkpoint()
    if made is not None:
        made.close()
    return model


PROGRAMS: Final[dict[str, Callable[[Settings], Model]]] = {
    "transformers": transformers,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
    "deepspeed": deepspeed,
}


def session(settings: Settings) -> dict[str, Any]:
    """The arguments of `Session` that all programs give."""
    return {**SESSION, "directory": settings.folder / "run"}


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    write_result(settings, PROGRAMS[settings.framework](settings))
    # A rank of gloo that ends first may abort another one.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
