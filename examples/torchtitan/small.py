"""What a small example needs: a tokenizer without files, and torchtitan on a machine without a GPU.

torchtitan is for GPUs. A program that imports this module before the rest of torchtitan trains on
the CPU if there is no GPU. With GPUs, only the tokenizer is of use.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torchtitan.tools.utils as device
from torch.distributed.fsdp import FSDPModule

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    device.device_type, device.device_module = "cpu", torch.cpu

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402


class CpuMemory:
    """What torchtitan reports of a device's memory. It has no such figures for a CPU."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


if not HAS_GPU:
    metrics.build_device_memory_monitor = CpuMemory
    # It passes the number of a GPU to a barrier.
    distributed.set_pg_timeouts = lambda **_: None


class Bytes(BaseTokenizer):
    """Each byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [*([1] if add_bos else []), *text.encode(), *([0] if add_eos else [])]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def fit_for_cpu(spec: ModelSpec) -> ModelSpec:
    """Change a model's spec so that it trains on a CPU, with gloo and without a compiler."""
    if HAS_GPU:
        return spec
    for _, _, parent, name in spec.model.traverse(FlexAttention.Config):
        setattr(parent, name, ScaledDotProductAttention.Config())
    parallelize = spec.parallelize_fn

    def with_sums(model: torch.nn.Module, **given: Any) -> torch.nn.Module:
        model = parallelize(model, **given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo cannot scale gradients while it adds them.
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = with_sums
    return spec
