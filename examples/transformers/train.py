"""A small causal language model with the Hugging Face `Trainer`, as in its example run_clm.py.

holdfast submit examples/transformers/spec.toml

The text is the sources of Python's standard library, byte by byte, so nothing is downloaded. One
line differs from a program without Holdfast.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from holdfast.trainer.frameworks.transformers import Trainer  # + holdfast: instead of transformers


@dataclass
class ModelArguments:
    """The size of the model and of its text."""

    layers: int = field(default=2)
    width: int = field(default=64)
    block_size: int = field(default=64)
    text_bytes: int = field(default=1_000_000)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of bytes as tokens. The labels are the tokens; the model shifts them."""

    def __init__(self, text: bytes, block_size: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._blocks = tokens[: len(tokens) // block_size * block_size].view(-1, block_size)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._blocks[index], "labels": self._blocks[index]}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    sizes, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: sizes.text_bytes]
    held_out = len(text) // 20

    config = GPT2Config(
        vocab_size=256,
        n_positions=sizes.block_size,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=training_args,
        train_dataset=Blocks(text[held_out:], sizes.block_size),
        eval_dataset=Blocks(text[:held_out], sizes.block_size),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
