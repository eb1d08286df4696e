"""A torchtitan program as its user writes it, started by torchrun: settings are one JSON argument.

`small` of the example lets torchtitan train on a CPU. Each rank appends a line per step to
`rank<r>.jsonl` in the folder of the settings.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "examples" / "torchtitan"))

from small import Bytes, fit_for_cpu  # type: ignore[import-not-found]
from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager as Stock
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.torchtitan import (
    CheckpointManager,
    TokenDataLoader,
)
from holdfast.trainer.frameworks.torchtitan.streamed import PackedShards
from holdfast.trainer.streams.loader import StreamLoader

SEQ_LEN: Final = 16
LOCAL_BATCH: Final = 2
GLOBAL_BATCH: Final = 4
SAMPLES: Final = 24
DOCUMENTS: Final = 40
CHATS, CHATS_SHARDS = 30, 3


def note(settings: dict[str, Any], **facts: Any) -> None:
    """Append a line to this rank's record."""
    path = Path(settings["folder"]) / f"rank{torch.distributed.get_rank()}.jsonl"
    with open(path, "a") as record:
        record.write(json.dumps(facts) + "\n")


class Validations(metrics.MetricsProcessor):
    """Records each validation."""

    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):
        pass

    settings: dict[str, Any]

    def log_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        note(self.settings, validated=step, loss=loss)
        super().log_validation(loss, step, extra_metrics)


class Recorded(Trainer):
    """A trainer that records each step, and is interrupted where the settings say so."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    settings: dict[str, Any]

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        starts: list[list[int]] = []
        rows: list[list[Any]] = []
        self.losses: list[float] = []

        def watched() -> Iterator[Any]:
            for inputs, labels in data_iterator:
                starts.extend(inputs["input"][:, :4].tolist())
                if (stream := getattr(self.dataloader, "stream", None)) is not None:
                    rows.append([stream.epoch, inputs["input"].tolist(), labels.tolist()])
                yield inputs, labels

        super().train_step(watched())
        note(
            self.settings,
            step=self.step,
            world=torch.distributed.get_world_size(),
            samples=starts,
            rows=rows,
            loss=sum(self.losses),
            lr=self.lr_schedulers.schedulers[0].get_last_lr(),
            draw=torch.rand(()).item(),
            tokens=self.ntokens_seen,
        )
        self._interrupt()
        time.sleep(self.settings.get("sleep_s", 0.0))

    def forward_backward_step(self, **given: Any) -> Any:
        loss = super().forward_backward_step(**given)
        self.losses.append(loss.item())
        return loss

    def _interrupt(self) -> None:
        """`kill` and `term` are [rank, step], once. `fail` is a step."""
        here = [torch.distributed.get_rank(), self.step]
        for name, number in (("kill", signal.SIGKILL), ("term", signal.SIGTERM)):
            taken = Path(self.settings["folder"]) / f"taken-{name}"
            if self.settings.get(name) == here and not taken.exists():
                taken.touch()
                os.kill(os.getpid(), number)
        if self.settings.get("fail") == self.step:
            raise ArithmeticError("no such loss")


def make_config(settings: dict[str, Any]) -> Any:
    """Return the configuration of a small Llama 3 with FSDP2."""
    folder = Path(settings["folder"])
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[: settings.get("layers", 1)]
    managers = {"holdfast": CheckpointManager.Config, "torchtitan": Stock.Config}
    options = {"interval": 2, **settings.get("checkpoint", {})}
    loader = make_loader(folder, settings)
    return Recorded.Config(
        model_spec=fit_for_cpu(spec),
        loss=CrossEntropyLoss.Config(),
        dump_folder=str(folder / "outputs"),
        tokenizer=Bytes.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=LOCAL_BATCH,
            global_batch_size=settings.get("global_batch", GLOBAL_BATCH),
            seq_len=SEQ_LEN,
            steps=settings["steps"],
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=loader,
        metrics=Validations.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", **settings.get("parallelism", {})
        ),
        checkpoint=managers[settings.get("manager", "holdfast")](**options),
        validator=Validator.Config(
            enable=settings.get("validates", False),
            freq=1,
            steps=1,
            dataloader=replace(loader, infinite=False),
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=3, enable_structured_logging=False),
    )


def make_loader(folder: Path, settings: dict[str, Any]) -> Any:
    """Return the configuration of Holdfast's loader, or of torchtitan's."""
    if settings.get("loader", "tokens") == "tokens":
        return TokenDataLoader.Config(dataset_path=str(folder / "tokens.npy"), seed=5)
    kind = settings["loader"]
    text_datasets.DATASETS["numbers"] = text_datasets.DatasetConfig(
        path="", loader=lambda _: numbers(kind), sample_processor=lambda sample: sample["text"]
    )
    return text_datasets.HuggingFaceTextDataLoader.Config(
        dataset="numbers", num_workers=settings.get("workers", 0)
    )


def numbers(kind: str) -> Any:
    """Return documents: with an index, or as a stream, which may map or have a shuffle buffer."""
    indexed = text_datasets.Dataset.from_dict(
        {"text": [" ".join(map(str, range(at, at + 9))) for at in range(DOCUMENTS)]}
    )
    if kind == "torchtitan":
        return indexed
    stream = indexed.to_iterable_dataset(num_shards=4)
    if kind == "shuffled":
        return stream.shuffle(seed=1, buffer_size=8)
    return stream.map(dict) if kind == "mapped" else stream


def refusal(options: dict[str, Any]) -> str:
    """Return the error of a configuration of Holdfast's manager."""
    try:
        CheckpointManager.Config(**options)
    except SpecError as error:
        return str(error)
    return ""


def batches_of(folder: Path) -> dict[str, Any]:
    """Return what the loader gives at two degrees, after a state, and with a separator."""

    def loader(rank: int, degree: int, **options: Any) -> Any:
        config = TokenDataLoader.Config(dataset_path=str(folder / "tokens.npy"), **options)
        return config.build(
            dp_world_size=degree,
            dp_rank=rank,
            tokenizer=None,
            seq_len=SEQ_LEN,
            local_batch_size=LOCAL_BATCH,
        )

    def starts(batches: Any) -> list[list[int]]:
        return [row for inputs, _ in batches for row in inputs["input"][:, :4].tolist()]

    stopped, continued = loader(0, 2), loader(0, 1, infinite=False)
    few = starts(itertools.islice(stopped, 2))
    continued.load_state_dict(stopped.state_dict())
    (inputs, _), *_ = loader(0, 1, infinite=False)
    separator = inputs["input"][0, 5].item()
    (inputs, labels), *_ = loader(0, 1, infinite=False, separator=separator)
    return {
        "pair": [starts(loader(rank, 2, infinite=False)) for rank in range(2)],
        "alone": starts(loader(0, 1, infinite=False)),
        "with a worker": starts(loader(0, 1, infinite=False, num_workers=1)),
        "first of pair": few,
        "continued alone": starts(continued),
        "inputs": inputs["input"].tolist(),
        "positions": inputs["positions"].tolist(),
        "labels": labels.tolist(),
        "separator": separator,
    }


class Chats(Bytes):
    """A tokenizer with a template for questions and answers."""

    def apply_chat_template(self, messages: list[dict[str, str]], **prompt: bool) -> str:
        return "".join(f"{each['role'][0]}{each['content']}|" for each in messages)


def chats_of(folder: Path) -> dict[str, Any]:
    """Return what the loader of a stream of chats gives, and what it gives after each place."""
    # It imports the tools of tests, which the training programs need not.
    from tests.unit.test_streams import alone, check_resumes

    for shard in range(CHATS_SHARDS):
        rows = [{"q": str(at), "a": "x" * (at % 9)} for at in range(shard, CHATS, CHATS_SHARDS)]
        (folder / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def process(row: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]

    files = {"data_files": str(folder / "*.jsonl"), "split": "train", "streaming": True}
    config = text_datasets.ChatDataLoader.Config(
        dataset_path="json", load_dataset_kwargs=files, sample_processor=process, infinite=False
    )
    tokenizer = Chats(Bytes.Config(), tokenizer_path="")
    options = {"dp_world_size": 2, "dp_rank": 1, "seq_len": SEQ_LEN, "local_batch_size": 2}
    packed = PackedShards(config.build(tokenizer=tokenizer, **options).dataset, degree=2)

    def collate(rows: list[Any]) -> list[Any]:
        return [[inputs["input"].tolist(), labels.tolist()] for inputs, labels in rows]

    def loader() -> StreamLoader:
        return alone(packed, batch=2, collate=collate, filler=packed.filler)

    whole = list(loader())
    check_resumes(loader, whole)
    return {
        "whole": whole,
        "labels": [[*f"a{'x' * (at % 9)}|".encode(), tokenizer.eos_id] for at in range(CHATS)],
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    if "chats" in settings:
        print(json.dumps(chats_of(Path(settings["chats"]))))
        return
    if "refused" in settings:
        print(json.dumps([refusal(options) for options in settings["refused"]]))
        return
    if "batches" in settings:
        print(json.dumps(batches_of(Path(settings["batches"]))))
        return
    trainer = make_config(settings).build()
    trainer.settings = trainer.metrics_processor.settings = settings
    # As torchtitan.train does.
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    trainer.close()
    torch.distributed.destroy_process_group()
    print("the program has ended", flush=True)


if __name__ == "__main__":
    main()
