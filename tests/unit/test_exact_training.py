"""Schedulers, scalers, averages, frozen parameters: sessions and resumes do not change training.

Each program is trained by plain torch, and in a session in several launches whose initial weights
differ; a resume replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.optim.swa_utils import get_ema_multi_avg_fn as ema_of

from holdfast.trainer import Session, load_checkpoint

STEPS = 8
STOPS = (1, 3, 5)
OVERFLOWS_AT = 2
pytestmark = pytest.mark.timeout(120)


@dataclass
class Parts:
    """A program: the arguments of its session, and hooks before and after each step."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    before: Callable[[int], None] = lambda _: None
    after: Callable[[int, float], None] = lambda _step, _loss: None
    trace: list[Any] = field(default_factory=list)


class Net(nn.Module):
    """A net that uses its third layer from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.2)

    def forward(self, given: torch.Tensor, step: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != 2 or step >= 4:
                given = layer(given).tanh()
        return torch.as_tensor(self.drop(self.norm(given)))


def make(seed: int, **options: Any) -> Parts:
    torch.manual_seed(seed)
    net = Net()
    layers = list(net.layers)
    groups = [
        {"params": [*layers[0].parameters(), *net.norm.parameters()], "lr": 0.05},
        {"params": [p for layer in layers[1:] for p in layer.parameters()], "weight_decay": 0.3},
    ]
    return Parts(net, torch.optim.Adam(groups, lr=0.02, **options))


def with_scheduler(seed: int, kind: Callable[[Any], Any]) -> Parts:
    parts = make(seed)
    scheduler = kind(parts.optimizer)
    parts.schedulers = [scheduler]
    needs_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    parts.after = lambda _, loss: scheduler.step(loss) if needs_loss else scheduler.step()
    return parts


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "swa": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
}


def averaged(seed: int) -> Parts:
    parts = make(seed, amsgrad=True)
    average = ema_of(0.8)  # type: ignore[no-untyped-call]
    ema = AveragedModel(parts.net, multi_avg_fn=average, use_buffers=True)
    parts.extra = {"ema": ema}
    parts.after = lambda _step, _loss: ema.update_parameters(parts.net)
    return parts


def scaled(seed: int) -> Parts:
    parts = make(seed)
    parts.extra = {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)}
    return parts


def unfrozen(seed: int) -> Parts:
    """Unfreezes its second layer at step 4 and freezes its fourth at step 6."""
    parts = make(seed)

    def before(step: int) -> None:
        parts.net.get_submodule("layers.1").requires_grad_(step >= 4)
        parts.net.get_submodule("layers.3").requires_grad_(step < 6)

    parts.before = before
    return parts


def tensor_learning_rate(seed: int) -> Parts:
    parts = make(seed, weight_decay=0.1)
    for group in parts.optimizer.param_groups:
        group["lr"] = torch.tensor(0.05)
    scheduler = lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    parts.schedulers, parts.after = [scheduler], lambda _step, _loss: scheduler.step()
    return parts


def empty_group(seed: int) -> Parts:
    parts = make(seed)
    parts.optimizer.add_param_group({"params": [], "lr": 0.4, "betas": (0.5, 0.6)})
    scheduler = lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    parts.schedulers, parts.after = [scheduler], lambda _step, _loss: scheduler.step()
    return parts


PROGRAMS: dict[str, Callable[[int], Parts]] = {
    **{name: partial(with_scheduler, kind=kind) for name, kind in SCHEDULERS.items()},
    "averaged": averaged,
    "scaled": scaled,
    "unfrozen": unfrozen,
    "tensor_learning_rate": tensor_learning_rate,
    "empty_group": empty_group,
}


def train(parts: Parts, steps: Iterable[int]) -> None:
    scaler = parts.extra.get("scaler")
    for step in steps:
        parts.before(step)
        given = torch.randn(5, 3)
        loss = parts.net(given, step).square().sum()
        parts.optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            parts.optimizer.step()
        else:
            # The first steps overflow, so they create no optimizer state.
            scaler.scale(loss * (float("inf") if step <= OVERFLOWS_AT else 1)).backward()
            scaler.step(parts.optimizer)
            scaler.update()
        parts.after(step, float(loss.detach()))
        parts.trace.append(seen(parts))


def seen(parts: Parts) -> Any:
    """Everything that a step can change, as exact numbers; the order of keys does not matter."""
    states = [thing.state_dict() for thing in (parts.net, parts.optimizer, *parts.extra.values())]
    rates = [group["lr"] for group in parts.optimizer.param_groups]
    last = [scheduler.get_last_lr() for scheduler in parts.schedulers]
    return exact([states, rates, last, torch.get_rng_state()])


def exact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: exact(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(exact, value))
    return value


def in_session(parts: Parts, directory: Path, last: int) -> list[Any]:
    with Session(
        parts.net,
        parts.optimizer,
        parts.schedulers,
        extra=parts.extra,
        directory=directory,
        interval=1000,
    ) as session:
        train(parts, session.steps(last))
    return parts.trace


@pytest.mark.more
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_equals_plain_torch_in_a_session_and_over_resumes(
    name: str, tmp_path: Path
) -> None:
    plain = PROGRAMS[name](0)
    train(plain, range(1, STEPS + 1))
    stops = STOPS if name in {"scaled", "unfrozen"} else STOPS[1:2]
    trace: list[Any] = []
    for seed, last in enumerate([*stops, STEPS]):
        trace += in_session(PROGRAMS[name](seed), tmp_path / "run", last)
    assert [n + 1 for n in range(STEPS) if trace[n] != plain.trace[n]] == []


def test_pytorch_143828_a_group_without_parameters_keeps_its_options(tmp_path: Path) -> None:
    in_session(empty_group(0), tmp_path, 4)
    again = empty_group(1)
    in_session(again, tmp_path, 5)
    group = again.optimizer.param_groups[2]
    assert group["lr"] == pytest.approx(0.4 * 0.9**5)
    assert (group["betas"], group["initial_lr"]) == ((0.5, 0.6), 0.4)


def test_pytorch_140900_a_scheduler_made_after_a_resume_has_its_initial_rates(
    tmp_path: Path,
) -> None:
    for last in (3, 6):
        parts = make(last)
        with Session(parts.net, parts.optimizer, directory=tmp_path, interval=100) as session:
            begun = session.step
            scheduler = lr_scheduler.StepLR(parts.optimizer, 2, 0.5, last_epoch=begun - 1)
            for step in session.steps(last):
                train(parts, [step])
                scheduler.step()
        rates = [group["initial_lr"] for group in parts.optimizer.param_groups]
        assert rates == [0.05, 0.02]
    assert [group["lr"] for group in parts.optimizer.param_groups] == [0.05 / 8, 0.02 / 8]


def test_pytorch_144657_changes_during_a_save_are_not_saved(tmp_path: Path) -> None:
    parts = make(0)
    with Session(parts.net, parts.optimizer, directory=tmp_path, interval=2) as session:
        wanted = {}
        for step in session.steps(4):
            if step == 3:
                # The save of step 2 is in progress.
                wanted = {k: v.clone() for k, v in parts.net.state_dict().items()}
                with torch.no_grad():
                    for tensor in parts.net.state_dict().values():
                        tensor.zero_()
            train(parts, [step])
    (saved,) = (tmp_path / "checkpoints").glob("step-00000002.*")
    again = make(1)
    load_checkpoint(saved, again.net, again.optimizer)
    assert all(torch.equal(v, wanted[k]) for k, v in again.net.state_dict().items())
