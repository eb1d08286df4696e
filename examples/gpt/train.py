"""Train a byte-level GPT with FSDP2, on CPUs (gloo) or GPUs (nccl), with any number of ranks.

With `holdfast submit`: holdfast submit examples/gpt/spec.toml --wait
With torchrun alone:    torchrun --nproc-per-node 2 examples/gpt/train.py examples/gpt/spec.toml
The lines for Holdfast are marked with `# holdfast`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, VOCABULARY, Shape
from text import Text
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from holdfast.trainer import Session  # holdfast
from holdfast.trainer.config import config  # holdfast


def main() -> None:
    settings = config(sys.argv[1] if len(sys.argv) > 1 else None)
    device = start()
    model, optimizer, scheduler = build(settings, device)
    text = Text(settings["context"], settings["text_bytes"])
    with Session(model, optimizer, scheduler, seed=settings["seed"]) as session:  # holdfast
        record = Record(session) if settings["record"] else None
        for step in session.steps(settings["steps"]):  # holdfast
            ids = session.batch(len(text), settings["global_batch"])  # holdfast
            parts = ids.micro(settings["micro_batch"])
            loss_sum = sum(backward(model, text, part, len(parts), device) for part in parts)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loss = global_mean(loss_sum, settings["global_batch"] * settings["context"], device)
            session.log(loss=loss, grad_norm=float(norm.full_tensor()))  # holdfast
            if record:
                record.write(step=step, ids=ids.tolist(), loss_sum=loss_sum, loss=loss)
            if dist.get_rank() == 0 and step % settings["print_every"] == 0:
                print(f"step {step} loss {loss:.4f}", flush=True)
        if record:
            record.close()
    dist.destroy_process_group()


def start() -> torch.device:
    """Join the process group. Return the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def build(
    settings: dict[str, Any], device: torch.device
) -> tuple[GPT, torch.optim.AdamW, LambdaLR]:
    """Return the sharded model, its optimizer and a scheduler with a linear warm-up."""
    torch.manual_seed(settings["seed"])
    names = ("layers", "heads", "width", "context", "dropout")
    model = GPT(Shape(**{name: settings[name] for name in names})).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    warmup = settings["warmup_steps"]
    return model, optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))


def backward(model: GPT, text: Text, ids: Any, parts: int, device: torch.device) -> float:
    """Add the gradients of a micro-batch's share of the mean loss. Return its loss sum in nats."""
    inputs, targets = (half.to(device) for half in text.windows(ids))
    logits = model(inputs)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
    (loss / parts).backward()
    return loss.item() * targets.numel()


def global_mean(loss_sum: float, count: int, device: torch.device) -> float:
    """Return the mean loss per byte over all ranks, from each rank's sum."""
    total = torch.tensor(loss_sum, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / count


class Record:
    """Writes one JSON line per step and rank, to compare runs sample by sample."""

    def __init__(self, session: Session) -> None:
        folder = session.run_directory / "records"
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = open(folder / f"rank{session.rank}.jsonl", "a")  # noqa: SIM115

    def write(self, **line: Any) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


if __name__ == "__main__":
    main()
