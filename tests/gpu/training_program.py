"""A small training program for a GPU, in the form that its settings name; it resumes by itself.

Its one argument is JSON: {form, device, steps, directory}. `EXACT_KILL_AT` in the environment is
the step in which every rank kills itself. Rank 0 prints the losses and a digest of all state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.trainer import Session

SAMPLES, BATCH, WIDTH = 96, 12, 64


def main() -> None:
    settings = json.loads(sys.argv[1])
    device = prepare(settings["device"], settings["form"])
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 4)
    model, run = FORMS[settings["form"]](device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)
    has_scaler = settings["form"] == "scaler"
    extra = {"scaler": scaler} if has_scaler else {}
    kill_at = int(os.environ.get("EXACT_KILL_AT", "0"))
    losses = []
    # Built and warmed up first: the random numbers of a resume are those of the checkpoint.
    with Session(model, optimizer, seed=3, extra=extra, directory=settings["directory"]) as session:
        for step in session.steps(settings["steps"]):
            ids = session.batch(SAMPLES, BATCH)
            rows, wanted = inputs[ids].to(device), targets[ids].to(device)
            with half_precision(device) if has_scaler else contextlib.nullcontext():
                loss = F.mse_loss(run(rows).float(), wanted)
            scaled = scaler.scale(loss) if has_scaler else loss
            scaled.backward()  # type: ignore[no-untyped-call]
            if has_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            losses.append((step, float(loss)))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        digest = digest_of(model, optimizer, scaler if has_scaler else None)
        if session.rank == 0:
            print(json.dumps({"losses": losses, "digest": digest}), flush=True)
    dist.destroy_process_group()


def prepare(kind: str, form: str) -> torch.device:
    """Join the process group on this rank's device, with deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Only NCCL, beside the session's own gloo group; CPU offload needs gloo in the program too.
    backend = "cpu:gloo,cuda:nccl" if form == "offloaded" else "nccl"
    dist.init_process_group(backend, device_id=device)
    return device


def half_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype)


def layers() -> nn.Sequential:
    """A small network with dropout, which uses the device's random generator."""
    return nn.Sequential(
        nn.Linear(16, WIDTH),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, 4),
    )


Built = tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]


def plain(device: torch.device) -> Built:
    model = layers().to(device)
    wrapped = DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
    return model, wrapped


def compiled(device: torch.device) -> Built:
    model, wrapped = plain(device)
    return model, torch.compile(wrapped)


def offloaded(device: torch.device) -> Built:
    """FSDP2 with parameters and optimizer state in host memory."""
    model = layers()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    fully_shard(model, mesh=mesh, offload_policy=offload)
    return model, model


def mixed(device: torch.device) -> Built:
    """FSDP2 that computes in bfloat16."""
    model = layers().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, model


FORMS: dict[str, Callable[[torch.device], Built]] = {
    "plain": plain,
    "scaler": plain,
    "compiled": compiled,
    "offloaded": offloaded,
    "mixed": mixed,
}


def digest_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> str:
    """A digest of everything that a checkpoint saves of this rank, generator states included."""
    digest = hashlib.sha256()
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(own.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    digest.update(json.dumps(scaler.state_dict() if scaler else {}, sort_keys=True).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
