"""Pretraining with torchtitan, in the shape of its `llama3_debugmodel`.

The lines marked `holdfast` differ from a program without Holdfast. The text is Python's own
standard library, so that nothing is downloaded.

holdfast submit examples/torchtitan/spec.toml
"""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

from small import Bytes, fit_for_cpu  # isort: skip  # before the rest of torchtitan
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from holdfast.trainer.frameworks.torchtitan import (
    CheckpointManager,  # holdfast: instead of torchtitan's
    TokenDataLoader,  # holdfast: instead of HuggingFaceTextDataLoader
)

END = 0  # the byte after each file
FILES_MAX = 60
TOKENS = Path("torchtitan-tokens.npy")


def write_tokens(path: Path) -> Path:
    """Write the files of the standard library as one row of bytes."""
    if not path.exists():
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES_MAX]
        text = b"".join(file.read_bytes() + bytes([END]) for file in files)
        # Each rank may write it, and the last one to rename it wins.
        part = path.with_suffix(f".{os.getpid()}.npy")
        np.save(part, np.frombuffer(text, dtype=np.uint8))
        part.rename(path)
    return path


def config() -> Trainer.Config:
    """Return the configuration of a Llama 3 with two layers."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    return Trainer.Config(
        model_spec=fit_for_cpu(spec),
        tokenizer=Bytes.Config(),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4,  # the same at every number of ranks
            seq_len=64,
            steps=40,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=TokenDataLoader.Config(
            dataset_path=str(write_tokens(TOKENS).absolute()), separator=END
        ),
        metrics=MetricsProcessor.Config(log_freq=10, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(interval=10),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


def main() -> None:
    """Train as `torchtitan.train` does."""
    init_logger()
    trainer = config().build()
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
