"""What a trainer under Holdfast cannot do: refused before the first step, with a way out."""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from transformers.trainer_utils import has_length

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.streamed import is_stream
from holdfast.trainer.numerics.guard import chosen_numerics

ADVICE: Final = {
    "jit": "enable_jit_checkpoint=True lets each rank save and stop alone after a SIGTERM. Leave "
    "it out: Holdfast stops all ranks after the same step",
    "auto_batch": "auto_find_batch_size=True changes the batch during the run, so no resume finds "
    "its place in the data. Set per_device_train_batch_size",
    "search": "hyperparameter_search trains several times in one program, and a run is one "
    "training. Submit one run for each trial",
    "deepspeed": "DeepSpeed keeps its own training state, which this adapter cannot save. Use DDP",
    "fsdp": "of FSDP, this adapter supports the second version on GPUs only. Set "
    "fsdp_config={'version': 2}, or FSDP_VERSION=2 for accelerate launch, or use DDP",
    "parallel": "tensor, context and sequence parallelism, and models that are sharded when they "
    "are loaded, are not supported by this adapter. Use DDP",
    "several_gpus": "one process with several GPUs is not supported. Start one rank for each GPU, "
    "as holdfast submit and torchrun do",
    "order": "accelerator_config={'use_seedable_sampler': False} gives an order that no resume can "
    "continue after the first epoch. Leave it at True",
    "state_dict": "model.state_dict was replaced by a function that returns only a part of the "
    "weights, so a checkpoint would lack the others. Remove the replacement. save_pretrained of a "
    "PEFT model writes only the adapter without it, too",
    "numerics": "supervision.numerics: the data of a Trainer comes in its own order, of which "
    "Holdfast cannot skip a part. Choose stop or warn for on_nan and on_spike",
}


def check_arguments(trainer: Any) -> None:
    """Raise `SpecError` for an argument of the trainer that excludes an exact resume."""
    problems = [ADVICE[name] for name in sorted(_refused(trainer))]
    if problems:
        raise SpecError("; ".join(problems))


def check_loader(loader: Any) -> None:
    """Raise `SpecError` for a loader, other than a stream, whose position no resume can find."""
    dataset = getattr(loader, "dataset", None)
    if not (is_stream(loader) or has_length(loader)):
        raise SpecError(
            f"the training data is a {type(dataset).__name__} without an index, so no resume can "
            "find its position in it. Give the Trainer a dataset with __len__ and __getitem__, or "
            "a stream that names its shards, as holdfast.trainer.streams.StreamDataset does"
        )


def _refused(trainer: Any) -> set[str]:
    """Return the keys of `ADVICE` that apply to the trainer."""
    args = trainer.args
    sizes = trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()
    numerics = chosen_numerics()
    # Newer versions of Transformers can shard a model while they load it.
    is_sharded = getattr(trainer.model, "is_distributed_loading_by_transformers", False)
    found = {
        "jit": args.enable_jit_checkpoint,
        "auto_batch": args.auto_find_batch_size,
        "search": trainer.hp_search_backend is not None,
        "deepspeed": trainer.is_deepspeed_enabled,
        # `accelerate launch` can ask for it, too.
        "fsdp": (args.fsdp or trainer.is_fsdp_enabled) and not trainer.accelerator.is_fsdp2,
        "parallel": is_sharded or sizes != (1, 1, 1),
        "several_gpus": args.n_gpu > 1,
        "state_dict": _lacks_weights(trainer.model),
        "numerics": bool({"skip", "rollback"} & {numerics.on_nan, numerics.on_spike}),
        "order": args.world_size > 1 and not args.accelerator_config.use_seedable_sampler,
    }
    return {name for name, is_so in found.items() if is_so}


def _lacks_weights(model: nn.Module) -> bool:
    """Return True if the program has replaced the model's `state_dict`, and weights are missing."""
    if all("state_dict" not in vars(module) for module in model.modules()):
        return False
    return not {name for name, _ in model.named_parameters()} <= model.state_dict().keys()
