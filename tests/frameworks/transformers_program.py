"""A Hugging Face program with a tiny model: trained by its own `Trainer`, or by Holdfast's.

    torchrun … transformers_program.py '{"notes": "DIRECTORY", …}'

Each rank appends a line of JSON for each step, each evaluation and the end to its notes. The last
line under a key counts. So two runs are equal if their last lines are. The keys of the argument
that are not explained in `Settings` are arguments of `TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from holdfast.trainer.frameworks.transformers import HoldfastCallback, Trainer

WORDS: Final = 64
LENGTH: Final = 12
DEFAULTS: Final[dict[str, Any]] = {
    "use_cpu": True,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.01,
    "warmup_steps": 3,
    "logging_steps": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "remove_unused_columns": False,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 7,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the program does besides the arguments of its trainer.

    `kind` is "bare" for the trainer of Transformers, "class" or "callback" for Holdfast's.
    `kill_at` and `term_at` are steps at which rank 0 of the first launch gets that signal.
    `kill_in_evaluation` is a step after which it is killed within the evaluation.
    """

    notes: str
    kind: str = "class"
    samples: int = 48
    masks: bool = True
    patience: int = 0
    sleep_s: float = 0.0
    kill_at: int = 0
    term_at: int = 0
    kill_in_evaluation: int = 0


class Sentences(Dataset[dict[str, Any]]):
    """Sentences that are functions of their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = (torch.arange(LENGTH) * (index % 5 + 1) + index) % WORDS
        return {"input_ids": words, "ids": index}


class Collator:
    """Stacks sentences, and replaces words at random, as masked language modelling does."""

    def __init__(self, *, masks: bool) -> None:
        self._masks = masks

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        words = torch.stack([item["input_ids"] for item in items])
        labels = words.clone()
        if self._masks:
            words = torch.where(torch.rand(words.shape) < 0.1, torch.tensor(1), words)
        return {
            "input_ids": words,
            "labels": labels,
            "ids": torch.tensor([item["ids"] for item in items]),
        }


class Notes:
    """The notes of one rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self.parts: list[Any] = []

    def add(self, key: str, **facts: Any) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps([key, facts]) + "\n")

    def interrupt(self, number: signal.Signals) -> None:
        """Send rank 0 a signal, once in the life of a run."""
        taken = self.folder / "taken"
        if os.environ.get("RANK", "0") == "0" and not taken.exists():
            taken.touch()
            os.kill(os.getpid(), number)


class Noting(TrainerCallback):
    """Notes each step, and interrupts the run where the settings say so."""

    def __init__(self, notes: Notes, settings: Settings) -> None:
        self._notes, self._settings = notes, settings

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        notes, settings = self._notes, self._settings
        rate = more["lr_scheduler"].get_last_lr()
        notes.add(f"step {state.global_step}", parts=notes.parts, rate=rate)
        notes.parts = []
        time.sleep(settings.sleep_s)
        if state.global_step == settings.kill_at:
            notes.interrupt(signal.SIGKILL)
        if state.global_step == settings.term_at:
            notes.interrupt(signal.SIGTERM)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._settings.kill_in_evaluation:
            self._notes.interrupt(signal.SIGKILL)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self._notes.add(f"evaluation {state.global_step}", loss=metrics["eval_loss"])


def noting(kind: type[Any], notes: Notes) -> type[Any]:
    """Return a subclass that notes the samples and the loss of each batch."""

    class Noted(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            ids = inputs.pop("ids").tolist()
            loss = super().compute_loss(model, inputs, *rest, **more)
            if model.training:
                notes.parts.append([ids, loss.item()])
            return loss

    Noted.__name__ = Noted.__qualname__ = kind.__name__
    return Noted


def digest(tensors: Any) -> str:
    """Return a digest of named tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def make_trainer(settings: Settings, arguments: dict[str, Any], notes: Notes) -> Any:
    args = TrainingArguments(**{**DEFAULTS, "output_dir": str(notes.folder / "out"), **arguments})
    transformers.set_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    )
    callbacks: list[Any] = [Noting(notes, settings)]
    if settings.patience:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    if settings.kind == "callback":
        callbacks.append(HoldfastCallback())
    kind = Trainer if settings.kind == "class" else transformers.Trainer
    return noting(kind, notes)(
        model=model,
        args=args,
        train_dataset=Sentences(settings.samples),
        eval_dataset=Sentences(10),
        data_collator=Collator(masks=settings.masks),
        callbacks=callbacks,
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    known = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{k: v for k, v in given.items() if k in known})
    resume = given.pop("resume_from_checkpoint", None)
    torch.set_num_threads(1)
    notes = Notes(Path(settings.notes))
    arguments = {k: v for k, v in given.items() if k not in known}
    trainer = make_trainer(settings, arguments, notes)
    output = trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    timed = ("runtime", "per_second")
    history = [
        {k: v for k, v in entry.items() if not k.endswith(timed)} for entry in state.log_history
    ]
    notes.add(
        "end",
        step=state.global_step,
        loss=output.training_loss,
        history=history,
        best=[state.best_metric, state.best_global_step],
        epoch=state.epoch,
        flos=state.total_flos,
        weights=digest(trainer.model.state_dict()),
        random=torch.rand(3).tolist(),
    )


if __name__ == "__main__":
    main()
