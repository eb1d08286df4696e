"""Evaluations over a `StreamingDataset` in the frameworks, each in a forked process.

    python -m tests.frameworks.streaming_refusals DATA FOLDER

Prints the type and text of each program's error as JSON, by the name of its function.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tests.frameworks.refusals import print_errors
from tests.process.stream_program import import_streaming
from torch.utils.data import DataLoader, default_collate

DATA, FOLDER = sys.argv[-2], Path(sys.argv[-1])
# It declares operators of torchvision, which frameworks import where it is installed.
STREAMING: Any = import_streaming()
BATCH = 6


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, id: Any) -> dict[str, Any]:
        found = self.layer(id.float().reshape(-1, 1) / 100)
        return {"loss": (found**2).mean(), "logits": found}


def data() -> Any:
    return STREAMING.StreamingDataset(local=DATA, batch_size=BATCH, num_canonical_nodes=1)


def trainer_of(name: str, evaluation: Any = None, **more: Any) -> Any:
    from transformers import TrainingArguments

    from holdfast.trainer.frameworks.transformers import Trainer

    class Named(Trainer):
        session_options = {"directory": FOLDER / name}  # noqa: RUF012

    arguments = TrainingArguments(
        output_dir=str(FOLDER / f"{name}_out"),
        **{"use_cpu": True, "max_steps": 4, "per_device_train_batch_size": BATCH, **more},
        per_device_eval_batch_size=BATCH,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    training = data()
    return Named(
        model=Model(),
        args=arguments,
        train_dataset=training,
        eval_dataset=training if evaluation is None else evaluation,
        data_collator=default_collate,
    )


def transformers_evaluates_what_it_trains_on() -> None:
    trainer_of("evaluate").evaluate()


def transformers_predicts_what_it_trains_on() -> None:
    trainer = trainer_of("predict")
    trainer.predict(trainer.train_dataset)


def transformers_evaluates_between_steps() -> None:
    trainer_of("between", eval_strategy="steps", eval_steps=2).train()


def transformers_evaluates_another() -> None:
    found = trainer_of("other", data(), eval_strategy="steps", eval_steps=2)
    found.train()
    assert found.state.global_step == 4


def accelerate(name: str, *, shared: bool, first: bool = False) -> None:
    """Train on one loader and evaluate on itself, or on another over the same dataset."""
    from holdfast.trainer.frameworks.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, session={"directory": FOLDER / name})
    model, training = Model(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(each, batch_size=BATCH) for each in (training, training, data())]
    model, optimizer, *parts = accelerator.prepare(model, optimizer, *loaders)
    evaluated = parts[0] if first else parts[1] if shared else parts[2]
    for _ in accelerator.epochs(2):
        model.train()
        for inputs in parts[0]:
            accelerator.backward(model(**inputs)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        evaluate(evaluated)
    accelerator.end_training()


def evaluate(loader: Any) -> None:
    ids = [one for batch in loader for one in batch["id"].tolist()]
    assert sorted(ids) == list(range(len(ids))), ids


def accelerate_evaluates_its_training_loader() -> None:
    accelerate("accelerate_same", shared=True, first=True)


def accelerate_evaluates_another_loader_of_the_dataset() -> None:
    accelerate("accelerate_shared", shared=True)


def accelerate_evaluates_another() -> None:
    accelerate("accelerate_other", shared=False)


def fabric(name: str, place: int) -> None:
    from holdfast.trainer.frameworks.lightning import Fabric

    made = Fabric(accelerator="cpu", devices=1, session={"directory": FOLDER / name})
    made.launch()
    model, training = Model(), data()
    model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sets = (training, training, data())
    parts = [made.setup_dataloaders(DataLoader(each, batch_size=BATCH)) for each in sets]
    for _ in made.epochs(2):
        model.train()
        for inputs in parts[0]:
            made.backward(model(**inputs)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        evaluate(parts[place])


def fabric_evaluates_its_training_loader() -> None:
    fabric("fabric_same", 0)


def fabric_evaluates_another_loader_of_the_dataset() -> None:
    fabric("fabric_shared", 1)


def fabric_evaluates_another() -> None:
    fabric("fabric_other", 2)


def lightning(name: str, *, shared: bool, **more: Any) -> None:
    import lightning as L

    from holdfast.trainer.frameworks.lightning import Holdfast

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.evaluated = Model(), 0

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            self.evaluated += len(batch["id"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    training, module = data(), Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        callbacks=[Holdfast(directory=FOLDER / name)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    loaders = [DataLoader(each, batch_size=BATCH) for each in (training, training, data())]
    try:
        trainer.fit(module, loaders[0], loaders[1] if shared else loaders[2])
    finally:
        assert bool(trainer.global_step) is not shared
    assert module.evaluated >= 2 * training.num_samples


def lightning_evaluates_what_it_trains_on() -> None:
    lightning("lightning", shared=True)


def lightning_without_a_first_look_evaluates_what_it_trains_on() -> None:
    lightning("lightning_late", shared=True, num_sanity_val_steps=0)


def lightning_evaluates_another() -> None:
    lightning("lightning_other", shared=False)


if __name__ == "__main__":
    print_errors(
        (
            transformers_evaluates_what_it_trains_on,
            transformers_predicts_what_it_trains_on,
            transformers_evaluates_between_steps,
            transformers_evaluates_another,
            accelerate_evaluates_its_training_loader,
            accelerate_evaluates_another_loader_of_the_dataset,
            accelerate_evaluates_another,
            fabric_evaluates_its_training_loader,
            fabric_evaluates_another_loader_of_the_dataset,
            fabric_evaluates_another,
            lightning_evaluates_what_it_trains_on,
            lightning_without_a_first_look_evaluates_what_it_trains_on,
            lightning_evaluates_another,
        )
    )
