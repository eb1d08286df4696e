"""What an adapter must know of a DeepSpeed engine: whether it is supported, and what limits it."""

from __future__ import annotations

from typing import Any, Final

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from holdfast.contracts.errors import SpecError

# Without ZeRO, every rank has the complete state.
WHOLE_STAGE: Final = 0
WEIGHTS_STAGE: Final = 3
# The tensors per parameter that `deepspeed.checkpoint.ds_to_universal` converts.
CONVERTED: Final = {"exp_avg", "exp_avg_sq"}


def check_engine(engine: Any) -> None:
    """Raise `SpecError` with every reason why Holdfast cannot save and resume `engine`."""
    if not isinstance(engine, DeepSpeedEngine):
        raise SpecError(
            f"a {type(engine).__name__}: expected the engine, the first value that "
            "deepspeed.initialize returns"
        )
    if problems := _problems(engine):
        raise SpecError(f"this DeepSpeed engine is not supported: {'; '.join(problems)}", problems)


def _problems(engine: Any) -> list[str]:
    writer = engine.checkpoint_engine
    checks = {
        "its module is an engine too; call deepspeed.initialize once": isinstance(
            engine.module, DeepSpeedEngine
        ),
        "pipeline parallelism": isinstance(engine, PipelineEngine),
        "no optimizer; pass one, or its configuration, to deepspeed.initialize": (
            engine.optimizer is None
        ),
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "tensor parallelism": engine.mp_world_size > 1,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "optimizer state on NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "zero_optimization.elastic_checkpoint": bool(engine.zero_elastic_checkpoint()),
        "checkpoint.use_node_local_storage": bool(engine.use_node_local_storage()),
        f"the checkpoint writer {type(writer).__name__}; remove checkpoint.writer and "
        "datastates_ckpt from its configuration, because Holdfast writes in the background": (
            type(writer) is not TorchCheckpointEngine
        ),
    }
    return [problem for problem, is_found in checks.items() if is_found]


def why_fixed(engine: Any) -> str:
    """Return why other ranks cannot load the engine's state, "" if they can."""
    if engine.zero_optimization_stage() == WHOLE_STAGE:
        return ""
    inner = engine.optimizer.optimizer
    kept = {key for state in inner.state.values() for key in state} - {"step"}
    if kept and kept != CONVERTED:
        return (
            f"DeepSpeed converts only {', '.join(sorted(CONVERTED))} of an optimizer, and "
            f"{type(inner).__name__} has {', '.join(sorted(kept))}"
        )
    is_frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    if is_frozen and engine.zero_optimization_stage() == WEIGHTS_STAGE:
        return "DeepSpeed does not convert the frozen parameters of ZeRO stage 3"
    return ""
