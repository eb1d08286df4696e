"""Small training programs in common shapes, each adapted to a session.

The shapes are those of nanoGPT, minGPT's trainer, PyTorch's ImageNet example, an Accelerate script
and a Hugging Face `Trainer`; the code is our own. At each point of its loop a program calls `mark`,
where a test case can interrupt it. `note` records values that an uninterrupted run must have too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from holdfast.trainer import Session

SAMPLES = 50
# Does not divide the number of samples, so epochs have 5, 4, 4, … steps.
GLOBAL_BATCH = 12
WIDTH = 8


class Probe(Protocol):
    """The interface of a test case for the program."""

    def session(self, *parts: Any, **more: Any) -> Session:
        """A session in the case's folder."""
        ...

    def mark(self, place: str, at: int) -> None:
        """Called when the program is at `place` in the step or epoch `at`."""
        ...

    def note(self, key: str, **facts: Any) -> None:
        """Record values of the run; the last note under a key counts."""
        ...


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures that are functions of their index; each access augments at random."""

    def __init__(self, *, is_augmented: bool) -> None:
        self._is_augmented = is_augmented

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.sin(torch.arange(1, WIDTH + 1) * float(index + 1))
        if self._is_augmented:
            picture = picture + 0.1 * torch.randn(WIDTH)
        return picture, index % 3

    def __len__(self) -> int:
        return SAMPLES


def make_classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


def evaluate(model: nn.Module, probe: Probe, epoch: int) -> float:
    """Accuracy over a few batches of every rank, in percent."""
    model.eval()
    loader = DataLoader(Pictures(is_augmented=False), batch_size=10)
    right = torch.zeros(1)
    with torch.no_grad():
        for number, (pictures, labels) in enumerate(loader):
            right += (model(pictures).argmax(1) == labels).sum()
            if number == 2:
                probe.mark("in evaluation", epoch)
    dist.all_reduce(right)
    model.train()
    return float(100 * right / (SAMPLES * dist.get_world_size()))


def imagenet(probe: Probe) -> None:
    """PyTorch's ImageNet example: DDP, BatchNorm, StepLR and the best model, by epochs."""
    model = DistributedDataParallel(make_classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    session = probe.session(model, optimizer, scheduler, best=("accuracy", "max"))
    sampler = session.distributed_sampler(SAMPLES, GLOBAL_BATCH)
    loader = DataLoader(
        Pictures(is_augmented=True), batch_size=sampler.local_batch, sampler=sampler
    )
    probe.mark("before the loop", 0)
    for epoch in session.epochs(3):
        probe.mark("epoch begins", epoch)
        for pictures, labels in session.batches(loader):
            probe.mark("batch", session.step + 1)
            loss = F.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            probe.mark("backward", session.step + 1)
            optimizer.step()
            probe.mark("stepped", session.step + 1)
            probe.note(f"step {session.step + 1}", loss=loss.item(), lr=scheduler.get_last_lr())
        if session.should_stop:
            break
        probe.mark("end begins", epoch)
        accuracy = evaluate(model, probe, epoch)
        session.log(accuracy=accuracy)
        probe.mark("evaluated", epoch)
        scheduler.step()
        probe.mark("scheduled", epoch)
        if session.best.get("step") == session.step:
            session.checkpoint()
        probe.note(f"epoch {epoch}", accuracy=accuracy, lr=scheduler.get_last_lr())
        probe.mark("end ran", epoch)
    probe.mark("after the loop", 0)
    finish(probe, session, model, optimizer, scheduler)


def nanogpt(probe: Probe) -> None:
    """nanoGPT: its own learning rate, gradient accumulation, evaluation every few steps."""
    tokens = torch.arange(4 * SAMPLES + WIDTH + 1) * 7 % 13
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(13, 16), nn.Dropout(0.1), nn.Linear(16, 13))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    session = probe.session(model, optimizer, best=("loss/val", "min"))
    total = 14
    probe.mark("before the loop", 0)
    for step in session.steps(total):
        probe.mark("step begins", step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + math.cos(math.pi * step / total)) / 2
        parts = session.batch(4 * SAMPLES, GLOBAL_BATCH).micro(3)
        for part in parts:
            loss = language_loss(model, tokens, torch.as_tensor(part)) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            probe.mark("backward", step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe.mark("stepped", step)
        optimizer.zero_grad(set_to_none=True)
        session.log(loss=loss.item())
        probe.note(f"step {step}", loss=loss.item())
        if step % 4 == 0:
            # The evaluation draws random positions. Its value is that of the step's checkpoint.
            places = torch.randint(len(tokens) - WIDTH - 1, (6,))
            value = mean(language_loss(model, tokens, places))
            probe.mark("evaluated", step)
            session.log(**{"loss/val": value})
            probe.note(f"evaluation {step}", value=value)
            if session.best["step"] == step:
                session.checkpoint()
    probe.mark("after the loop", 0)
    finish(probe, session, model, optimizer)


def language_loss(model: nn.Module, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([tokens[place : place + WIDTH + 1] for place in places.tolist()])
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def mingpt(probe: Probe) -> None:
    """minGPT's trainer under DDP: a method runs an epoch over a loader and then a test."""
    model = DistributedDataParallel(make_classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = probe.session(model, optimizer)
    sampler = session.distributed_sampler(SAMPLES, GLOBAL_BATCH)
    loader = DataLoader(
        Pictures(is_augmented=True), batch_size=sampler.local_batch, sampler=sampler
    )

    def run_epoch(epoch: int) -> None:
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            step = session.step + 1
            probe.mark("batch", step)
            loss = F.cross_entropy(model(pictures + 0.01 * torch.rand(WIDTH)), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.mark("stepped", step)
            probe.note(f"step {step}", loss=loss.item())
            if session.boundary():
                return
            probe.mark("after the boundary", step)

    probe.mark("before the loop", 0)
    for epoch in session.epochs(3):
        probe.mark("epoch begins", epoch)
        run_epoch(epoch)
        if session.should_stop:
            break
        probe.mark("end begins", epoch)
        value = evaluate(model, probe, epoch)
        # The epoch end changes the learning rate and draws random numbers.
        optimizer.param_groups[0]["lr"] *= 0.5 + 0.1 * float(torch.rand(()))
        probe.note(f"epoch {epoch}", accuracy=value, lr=optimizer.param_groups[0]["lr"])
        probe.mark("end ran", epoch)
    probe.mark("after the loop", 0)
    finish(probe, session, model, optimizer)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer like Accelerate's; steps only when gradients are accumulated."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        self.optimizer, self._accelerator = optimizer, accelerator

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure) if self._accelerator.sync_gradients else None


class AcceleratedScheduler:
    """Wraps a scheduler and steps it once per rank, like Accelerate's."""

    def __init__(self, scheduler: Any, accelerator: Accelerator) -> None:
        self.scheduler, self._accelerator = scheduler, accelerator

    def step(self) -> None:
        if self._accelerator.sync_gradients:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()


class Accelerator:
    """The parts of Accelerate that a script uses: prepare, accumulate, gather."""

    def __init__(self, accumulation: int) -> None:
        self._accumulation, self._count = accumulation, 0
        self.sync_gradients = True

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
        return (
            DistributedDataParallel(model),
            AcceleratedOptimizer(optimizer, self),
            AcceleratedScheduler(scheduler, self),
        )

    def accumulate(self) -> None:
        self._count += 1
        self.sync_gradients = self._count % self._accumulation == 0


def accelerate(probe: Probe) -> None:
    """An Accelerate script: prepared objects, accumulation, a scheduler step in each step."""
    accelerator = Accelerator(accumulation=2)
    model = make_classifier()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 13)
    prepared, optimizer, scheduler = accelerator.prepare(model, adam, cosine)
    session = probe.session(prepared, optimizer, scheduler)
    world_size = dist.get_world_size()
    sampler = session.distributed_sampler(
        SAMPLES, GLOBAL_BATCH, batch_size=GLOBAL_BATCH // world_size // 2
    )
    loader = DataLoader(
        Pictures(is_augmented=True), batch_size=sampler.local_batch // 2, sampler=sampler
    )
    probe.mark("before the loop", 0)
    for epoch in session.epochs(3):
        probe.mark("epoch begins", epoch)
        for pictures, labels in loader:
            step = session.step + 1
            accelerator.accumulate()
            loss = F.cross_entropy(prepared(pictures), labels) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            probe.mark("backward", step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.mark("stepped", step)
            if accelerator.sync_gradients:
                probe.note(f"step {step}", loss=loss.item(), lr=scheduler.get_last_lr())
                if session.boundary():
                    break
        if session.should_stop:
            break
        probe.mark("end begins", epoch)
        accuracy = evaluate(prepared, probe, epoch)
        session.log(accuracy=accuracy)
        probe.note(f"epoch {epoch}", accuracy=accuracy)
        probe.mark("end ran", epoch)
    probe.mark("after the loop", 0)
    finish(probe, session, prepared, adam, scheduler)


class Callback:
    """The session as a trainer's callback."""

    def __init__(self, session: Session, epochs: int) -> None:
        self.session, self._epochs = session, session.epochs(epochs)

    def on_epoch_begin(self) -> int | None:
        """Finish the previous epoch and start the next one."""
        return next(self._epochs, None)

    def on_step_end(self) -> bool:
        return self.session.boundary()

    def on_train_end(self) -> None:
        next(self._epochs, None)


class Trainer:
    """Owns the loop, like Hugging Face's; programs pass it objects and callbacks."""

    def __init__(self, probe: Probe, model: nn.Module, total: int) -> None:
        self.probe, self.model, self.epochs = probe, model, 3
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: max(0.0, 1 - step / total)
        )
        self.history: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = list(state["history"])

    def train(self, loader: Any, callback: Callback) -> None:
        session, probe = callback.session, self.probe
        for _ in range(session.epoch, self.epochs):
            epoch = callback.on_epoch_begin()
            if epoch is None:
                return
            probe.mark("epoch begins", epoch)
            is_stopping = False
            for pictures, labels in loader:
                step = session.step + 1
                loss = F.cross_entropy(self.model(pictures), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                probe.mark("stepped", step)
                probe.note(f"step {step}", loss=loss.item(), lr=self.scheduler.get_last_lr())
                is_stopping = callback.on_step_end()
                probe.mark("after the callback", step)
                if is_stopping:
                    break
            if is_stopping:
                return
            probe.mark("end begins", epoch)
            self.history.append(evaluate(self.model, probe, epoch))
            probe.note(f"epoch {epoch}", history=list(self.history))
            probe.mark("end ran", epoch)
        callback.on_train_end()


def trainer(probe: Probe) -> None:
    """A Hugging Face `Trainer` with callbacks: the library owns the loop."""
    own = Trainer(probe, DistributedDataParallel(make_classifier()), total=13)
    session = probe.session(own.model, own.optimizer, own.scheduler, extra={"trainer": own})
    sampler = session.distributed_sampler(SAMPLES, GLOBAL_BATCH)
    loader = DataLoader(
        Pictures(is_augmented=True), batch_size=sampler.local_batch, sampler=sampler
    )
    probe.mark("before the loop", 0)
    own.train(loader, Callback(session, own.epochs))
    probe.mark("after the loop", 0)
    finish(probe, session, own.model, own.optimizer, own.scheduler)


def finish(probe: Probe, session: Session, *parts: Any) -> None:
    """Close the session, and note the whole state unless the run was stopped."""
    is_stopped = session.should_stop
    session.close()
    if not is_stopped:
        probe.note("end", step=session.step, best=session.best, state=list(tensors_of(parts)))
        probe.note("random", numbers=torch.rand(3).tolist())


def tensors_of(value: Any) -> Iterator[Any]:
    """Everything in the states of `value`, as plain numbers and text."""
    if isinstance(value, torch.Tensor):
        yield value.tolist()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "state_dict"):
        yield from tensors_of(value.state_dict())
    else:
        yield repr(value)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


SHAPES: dict[str, Callable[[Probe], None]] = {
    shape.__name__: shape for shape in (imagenet, nanogpt, mingpt, accelerate, trainer)
}
