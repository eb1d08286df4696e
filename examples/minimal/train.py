"""The smallest example: a plain torchrun loop with the lines that make it fault tolerant.

torchrun --nproc-per-node 2 examples/minimal/train.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.trainer import Session  # + holdfast

STEPS, SAMPLES, GLOBAL_BATCH = 100, 4096, 32

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 16)
targets = inputs @ torch.randn(16, 1)

model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = Session(model, optimizer, seed=0, interval=20)  # + holdfast
for step in session.steps(STEPS):  # + holdfast: instead of range(STEPS)
    ids = session.batch(SAMPLES, GLOBAL_BATCH)  # + holdfast: instead of a sampler
    loss = torch.nn.functional.mse_loss(model(inputs[ids]), targets[ids])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.log(loss=loss.item())  # + holdfast
    if session.rank == 0 and step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
session.close()  # + holdfast
dist.destroy_process_group()
