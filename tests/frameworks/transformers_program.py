"""A Hugging Face program with a tiny model: trained by its own `Trainer`, or by Holdfast's.

    torchrun … transformers_program.py '{"notes": "DIRECTORY", …}'

It notes each step, each evaluation and the end of every rank through `loop_cases.Case`. So two runs
are equal if their last notes are. The keys of the argument that `Settings` does not have are
arguments of `TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tests.support.loop_cases import Case
from torch.distributed.tensor import DTensor
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
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.01,
    "warmup_steps": 3,
    "logging_steps": 3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "remove_unused_columns": False,
    "report_to": [],
    "disable_tqdm": True,
    "log_level": "error",
    "seed": 7,
}
TIMED: Final = ("runtime", "per_second")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the program does besides the arguments of its trainer.

    `kind` is "bare" for the trainer of Transformers, "class" or "callback" for Holdfast's. `fsdp`
    is the form in which FSDP2 saves a model, or "" for DDP.
    """

    kind: str = "class"
    samples: int = 37
    patience: int = 0
    sleep_s: float = 0.0
    resume: str | bool | None = None
    fsdp: str = ""


class Sentences(Dataset[dict[str, Any]]):
    """Sentences that are functions of their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._samples:
            # The end of a loop over the dataset, as `group_by_length` has.
            raise IndexError(index)
        words = (torch.arange(LENGTH) * (index % 5 + 1) + index) % WORDS
        return {"input_ids": words, "ids": index}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack sentences, and replace words at random, as masked language modelling does."""
    labels = torch.stack([item["input_ids"] for item in items])
    words = torch.where(torch.rand(labels.shape) < 0.1, torch.tensor(1), labels)
    ids = torch.tensor([item["ids"] for item in items])
    return {"input_ids": words, "labels": labels, "ids": ids}


class Noting(TrainerCallback):
    """Notes steps and evaluations, and marks where a case can interrupt the run."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self._case, self._settings = case, settings
        self.parts: list[Any] = []
        self._passes = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._case.mark("epoch begins", state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._case.mark("step begins", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        rate = more["lr_scheduler"].get_last_lr()
        self._case.note(f"step {state.global_step}", parts=self.parts, rate=rate)
        self.parts, self._passes = [], 0
        time.sleep(self._settings.sleep_s)
        self._case.mark("step ends", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._case.mark("logged", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes += 1
        if self._passes == 1:
            self._case.mark("evaluates", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self._case.note(f"evaluation {state.global_step}", loss=metrics["eval_loss"])
        self._case.mark("evaluated", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes = 0
        self._case.mark("epoch ends", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._case.mark("training ends", state.global_step)


def noted(kind: type[Any], noting: Noting) -> type[Any]:
    """Return a subclass that notes the samples and the loss of each batch."""

    def compute_loss(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        ids = inputs.pop("ids").tolist()
        loss = kind.compute_loss(self, model, inputs, *rest, **more)
        if model.training:
            noting.parts.append([ids, loss.item()])
        return loss

    return type(kind.__name__, (kind,), {"compute_loss": compute_loss})


def sharded(kind: type[Any], form: str) -> type[Any]:
    """Return a subclass with FSDP2. Accelerate chooses it only on GPUs; it runs on CPUs, too."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        kind.create_accelerator_and_postprocess(self)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
        self.accelerator.state.fsdp_plugin = plugin
        for state in (self.accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True

    def save_model(self: Any, output_dir: str, _internal_call: bool = False) -> None:
        # Transformers looks for this directory before a sharded save creates it. Ranks that find
        # it then load the best model, and wait for the others.
        if not issubclass(kind, Trainer):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        kind.save_model(self, output_dir, _internal_call)

    methods = (create_accelerator_and_postprocess, save_model)
    return type(kind.__name__, (kind,), {each.__name__: each for each in methods})


def make_trainer(case: Case, settings: Settings, arguments: dict[str, Any]) -> Any:
    """Return the trainer of a run whose folder is that of the case."""
    args = TrainingArguments(**{**DEFAULTS, "output_dir": str(case.folder / "out"), **arguments})
    transformers.set_seed(args.seed)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    noting = Noting(case, settings)
    callbacks: list[Any] = [noting]
    if settings.patience:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    if settings.kind == "callback":
        callbacks.append(HoldfastCallback())
    kind = noted(Trainer if settings.kind == "class" else transformers.Trainer, noting)
    made = (sharded(kind, settings.fsdp) if settings.fsdp else kind)(
        model=model,
        args=args,
        train_dataset=Sentences(settings.samples),
        eval_dataset=Sentences(10),
        data_collator=collate,
        callbacks=callbacks,
    )
    mark_saves(made, case)
    return made


def mark_saves(trainer: Any, case: Case) -> None:
    """Mark where a directory is saved. A callback with `on_save` would be a reader of it."""
    handler = trainer.callback_handler
    tell = handler.on_save

    def on_save(args: Any, state: Any, control: Any) -> Any:
        case.mark("saved", state.global_step)
        return tell(args, state, control)

    handler.on_save = on_save


def train(case: Case, **given: Any) -> None:
    """Train, and note the whole result."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    known = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{k: v for k, v in given.items() if k in known})
    trainer = make_trainer(case, settings, {k: v for k, v in given.items() if k not in known})
    output = trainer.train(resume_from_checkpoint=settings.resume)
    state = trainer.state
    history = [
        {k: v for k, v in entry.items() if not k.endswith(TIMED)} for entry in state.log_history
    ]
    case.note(
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


def digest(tensors: dict[str, Any]) -> str:
    """Return a digest of named tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "steps" in given:
        # The name that `LocalRun` gives it.
        given["max_steps"] = given.pop("steps")
    folder = Path(given.pop("notes"))
    folder.mkdir(parents=True, exist_ok=True)
    train(Case(folder), **given)


if __name__ == "__main__":
    main()
