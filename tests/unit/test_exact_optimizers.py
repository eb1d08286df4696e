"""Training in a session equals training without one, bit for bit, with every optimizer.

One session has all optimizers of a group, each with its own net, so that each one is tested from
its first step and over a resume without a process for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.optimizer_cases import (
    THIRD_PARTY,
    Case,
    Net,
    is_runnable,
    torch_cases,
    torch_classes,
    train_step,
)
from torch import nn
from torch.optim import Optimizer

from holdfast.trainer import Session

STEPS = 6
STOPS = (1, 3)
CASES = [*torch_cases(), *THIRD_PARTY]
# They need an accelerator, a kernel that the class lacks, or parameters that are not leaves.
NEEDS_MORE = ("capturable", "fused", "differentiable")
# Plain torch does not run these on a CPU, so there is nothing to compare with.
REFUSED = {
    case.name
    for case in CASES
    if any(option in case.name for option in NEEDS_MORE) and not is_runnable(case)
}
RUNNABLE = [case for case in CASES if case.name not in REFUSED]
# The classes with their default options, and those with other options.
PLAIN = {case.name for case in RUNNABLE if case.name.endswith("_")} | {
    case.name for case in THIRD_PARTY
}
GROUPS = {
    "plain": [case for case in RUNNABLE if case.name in PLAIN],
    "changed": [case for case in RUNNABLE if case.name not in PLAIN],
}
MARKS: dict[str, Any] = {"plain": (), "changed": pytest.mark.more}

pytestmark = pytest.mark.timeout(180)
Trace = dict[str, list[torch.Tensor]]


class Program:
    """All nets of a group and their optimizers. `seed` draws their first weights and random
    numbers."""

    def __init__(self, seed: int, group: str) -> None:
        cases = GROUPS[group]
        torch.manual_seed(seed)
        self.nets = nn.ModuleDict({case.name: Net(case) for case in cases})
        self.optimizers = {case.name: case.make(self.nets[case.name]) for case in cases}
        self.trace: Trace = {case.name: [] for case in cases}

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for name, optimizer in self.optimizers.items():
                net = self.nets[name]
                train_step(net, optimizer, step)
                weights = [p.detach().flatten() for p in net.parameters()]
                self.trace[name].append(torch.cat([*weights, torch.rand(1)]))


Trained = Callable[[str], tuple[Program, list[Program]]]


def train_in_session(directory: Path, seed: int, last: int, group: str) -> Program:
    """One launch, which starts or resumes the run and stops after the step `last`."""
    program = Program(seed, group)
    with Session(
        program.nets, list(program.optimizers.values()), directory=directory, interval=1000
    ) as session:
        program.train(session.steps(last))
    return program


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a group at its first use: plainly, and in three launches of one run.

    Each launch has different initial weights, which a resume replaces. A parametrized fixture would
    train again for each test, because each test's group is another parameter to pytest.
    """

    @cache
    def train(group: str) -> tuple[Program, list[Program]]:
        plain = Program(0, group)
        plain.train(range(1, STEPS + 1))
        directory = tmp_path_factory.mktemp("exact") / "run"
        stops = enumerate([*STOPS, STEPS])
        return plain, [train_in_session(directory, number, last, group) for number, last in stops]

    return train


def test_every_torch_optimizer_is_covered_with_every_option() -> None:
    tried = {case.name.partition("_")[0] for case in RUNNABLE}
    assert {kind.__name__ for kind in torch_classes()} <= tried


@pytest.mark.parametrize(
    ("group", "case"),
    [
        pytest.param(group, case, marks=MARKS[group], id=case.name)
        for group, cases in GROUPS.items()
        for case in cases
    ],
)
def test_training_equals_plain_torch_from_the_first_step_and_over_resumes(
    group: str, case: Case, trained: Trained
) -> None:
    plain, launches = trained(group)
    trace = [row for program in launches for row in program.trace[case.name]]
    wanted = plain.trace[case.name]
    assert len(trace) == len(wanted) == STEPS
    assert all(torch.isfinite(row).all() for row in wanted)
    differ = [n + 1 for n in range(STEPS) if not torch.equal(trace[n], wanted[n])]
    assert differ == []
    assert_same(state_of(launches[-1], case.name), state_of(plain, case.name))


def state_of(program: Program, name: str) -> Any:
    optimizer: Optimizer = program.optimizers[name]
    return getattr(optimizer, "optimizer", optimizer).state_dict()


def assert_same(one: Any, other: Any) -> None:
    """Assert that all nested values and their types are equal."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for its, others in zip(one, other, strict=True):
            assert_same(its, others)
    elif hasattr(one, "tolist"):
        assert one.tolist() == other.tolist()
    else:
        assert one == other
