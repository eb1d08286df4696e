"""Fine-tuning with Accelerate, in the shape of its example `by_feature/checkpointing.py`.

Lines marked `holdfast` differ from a program without Holdfast. A small classifier of pairs of
vectors stands in for BERT and MRPC, so that nothing is downloaded.

holdfast submit examples/accelerate/spec.toml
"""

import argparse

import torch
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from holdfast.trainer.frameworks.accelerate import Accelerator  # holdfast: instead of accelerate

SAMPLES, WIDTH = 2048, 32


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of pairs. The label of a pair says which vector has the larger sum."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(SAMPLES, 2, WIDTH, generator=generator)
    labels = (pairs[:, 0] - pairs[:, 1]).sum(dim=1).gt(0).long()
    split = SAMPLES * 3 // 4
    train = TensorDataset(pairs[:split], labels[:split])
    evaluation = TensorDataset(pairs[split:], labels[split:])
    return (
        DataLoader(train, shuffle=True, batch_size=batch_size, drop_last=True),
        DataLoader(evaluation, batch_size=64),
    )


def training_function(args: argparse.Namespace) -> None:
    """Train, save the states that were asked for, and evaluate after each epoch."""
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(2 * WIDTH, 128),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    total = len(train_dataloader) * args.epochs // args.accumulate
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / max(total, 1)))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    starting_epoch, resume_step = 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        starting_epoch, resume_step = divmod(args.resume_step, len(train_dataloader))
    overall_step = accelerator.resume()  # holdfast: instead of 0

    for epoch in accelerator.epochs(args.epochs, starting_epoch):  # holdfast: instead of range()
        model.train()
        active_dataloader = train_dataloader
        if resume_step and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for step, (pairs, labels) in enumerate(
            active_dataloader,
            accelerator.first_batch,  # holdfast: instead of 0
        ):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(pairs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            if step % 20 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if args.checkpointing_steps and overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(f"{args.output_dir}/step_{overall_step}")

        model.eval()
        right = seen = 0
        for pairs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(pairs).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right, seen = right + int((predictions == labels).sum()), seen + len(labels)
        accelerator.log({"accuracy": right / seen}, step=overall_step)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.3f}", flush=True)
    accelerator.end_training()


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", default="states")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--resume_step", type=int, default=0)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
