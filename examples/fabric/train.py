"""An image classifier with Fabric, in the shape of its example `image_classifier/train_fabric.py`.

holdfast submit examples/fabric/spec.toml

Lines marked `holdfast` differ from a program without Holdfast. The pictures are made here, so that
nothing is downloaded.
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from holdfast.trainer.frameworks.lightning import Fabric  # holdfast: instead of lightning.fabric

SIDE, CLASSES = 8, 4


def make_pictures(count: int, seed: int) -> TensorDataset:
    """Noisy pictures of shape (count, 1, SIDE, SIDE), brighter in the quarter that is the class."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=draw)
    pictures = torch.randn(count, 1, SIDE, SIDE, generator=draw)
    half = torch.arange(SIDE) // (SIDE // 2)
    pictures += (half[:, None] * 2 + half == labels[:, None, None]).unsqueeze(1).float()
    return TensorDataset(pictures, labels)


def run(args: argparse.Namespace) -> None:
    """Train, and test after each epoch."""
    fabric = Fabric(accelerator=args.accelerator)
    fabric.launch()
    fabric.seed_everything(args.seed)
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(make_pictures(1024, 1), batch_size=args.batch_size, shuffle=True),
        DataLoader(make_pictures(256, 2), batch_size=args.batch_size),
    )
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()),
        nn.Linear(8 * (SIDE - 2) ** 2, CLASSES),
    )
    model, optimizer = fabric.setup(model, torch.optim.Adadelta(model.parameters(), lr=args.lr))
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in fabric.epochs(
        args.epochs + 1, 1
    ):  # holdfast: instead of range(1, args.epochs + 1)
        model.train()
        # holdfast: fabric.first_batch is 0 but for the epoch in which the run resumed
        for batch_idx, (data, target) in enumerate(train_loader, fabric.first_batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            fabric.backward(loss)
            optimizer.step()
            if batch_idx % 10 == 0:
                fabric.print(f"epoch {epoch}, batch {batch_idx}: loss {loss.item():.4f}")
        scheduler.step()

        model.eval()
        with torch.no_grad():
            correct = sum((model(data).argmax(1) == target).sum() for data, target in test_loader)
        accuracy = fabric.all_reduce(correct, reduce_op="sum") / len(test_loader.dataset)
        fabric.log("accuracy", accuracy)
        fabric.print(f"epoch {epoch}: accuracy {accuracy:.3f}")

    fabric.save("classifier.pt", {"model": model})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
