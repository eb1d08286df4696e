"""DeepSpeed's training loop with ZeRO, made fault tolerant: the five lines marked `+ holdfast`.

torchrun --nproc-per-node 2 examples/deepspeed/train.py

The program has the form of DeepSpeed's CIFAR-10 example, with small images that it draws itself.
"""

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.trainer.frameworks.deepspeed import DeepSpeedSession  # + holdfast

EPOCHS, SAMPLES, CLASSES = 3, 512, 10
CONFIG = {
    # The global batch is the same at every number of GPUs. DeepSpeed accumulates gradients for it.
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 16}},
    "zero_optimization": {"stage": 2},
}


def make_images() -> TensorDataset:
    """Images of a bright square on noise. The class is the square's place."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=source)
    images = torch.rand(SAMPLES, 3, 16, 16, generator=source)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, label : label + 4, label : label + 4] += 1.0
    return TensorDataset(images, labels)


if not torch.cuda.is_available():
    # Without a GPU, DeepSpeed would compile operations of its own for a minute.
    deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, CLASSES)
)
model_engine, _, trainloader, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), training_data=make_images(), config=CONFIG
)
session = DeepSpeedSession(model_engine)  # + holdfast: always resumes here
for epoch in session.epochs(EPOCHS):  # + holdfast: instead of range(EPOCHS)
    for images, labels in session.batches(trainloader):  # + holdfast: instead of trainloader
        outputs = model_engine(images.to(model_engine.device))
        loss = nn.functional.cross_entropy(outputs, labels.to(model_engine.device))
        model_engine.backward(loss)
        model_engine.step()
    if session.rank == 0:
        print(f"epoch {epoch} step {model_engine.global_steps} loss {loss.item():.4f}", flush=True)
session.close()  # + holdfast
