"""A program that gives its own interval between checkpoints."""

import torch

from holdfast.trainer import Session

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, seed=0, interval=5, snapshots="off")
for _step in session.steps(12):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
session.close()
