"""A small causal language model with the Hugging Face `Trainer`, trained on a stream of lines.

holdfast submit examples/streams/spec.toml

Each module of Python's standard library is a shard, so nothing is downloaded. Lines marked
`holdfast` differ from a program without Holdfast. A dataset that was loaded with `streaming=True`
takes the place of `StreamDataset` as it is.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from holdfast.trainer.frameworks.transformers import Trainer  # holdfast: instead of transformers
from holdfast.trainer.streams import StreamDataset, TextLines  # holdfast

WIDTH = 64


def tokens(line: bytes) -> dict[str, list[int]]:
    """Return the bytes of a line as tokens. The labels are the tokens; the model shifts them."""
    padded = list(line[:WIDTH].ljust(WIDTH))
    return {"input_ids": padded, "labels": padded}


def main() -> None:
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    # Each loader worker reads lines of four files in turn, shuffled in blocks of 256.
    data = StreamDataset(TextLines(sources, tokens), shuffle=True, buffer=256, open_shards=4)
    config = GPT2Config(
        vocab_size=256,
        n_positions=WIDTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config), args=training_args, train_dataset=data
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
