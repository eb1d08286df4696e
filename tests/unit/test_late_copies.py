"""Copies that a thread makes while training continues: what they may copy, and what they notice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.trainer.staging import copying
from holdfast.trainer.staging.copying import LATE_BYTES_MIN, LATE_MOVE_BYTES, Copier

WAIT_S = 120.0
NICE_MAX = 19
NUMBERS = 5_000_000  # 20 MB: several pieces


def tensors(count: int = 2) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(NUMBERS, generator=made) for _ in range(count)]


def addresses(sources: list[torch.Tensor]) -> set[int]:
    return {source.data_ptr() for source in sources}


@contextmanager
def held_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the thread of a late copy wait before its first byte until the event is set."""
    may_run, move = threading.Event(), copying._move_all

    def late(moves: Any, most: int = copying.MOVE_BYTES, write: Any = None) -> None:
        if most == LATE_MOVE_BYTES:
            assert may_run.wait(WAIT_S)
        move(moves, most, write)

    monkeypatch.setattr(copying, "_move_all", late)
    yield may_run
    may_run.set()


def begun(sources: list[torch.Tensor], views: list[torch.Tensor]) -> copying.LateCopy:
    copy = Copier(views, threads=1).copy(sources, addresses(sources))
    assert isinstance(copy, copying.LateCopy)
    assert copy.indices == [*range(len(sources))]
    return copy


def test_a_late_copy_has_the_bytes_of_its_beginning() -> None:
    sources = tensors()
    views = [torch.empty_like(source) for source in sources]
    copy = begun([source.detach() for source in sources], views)
    assert copy.finish()
    assert copy.is_done
    for view, source in zip(views, sources, strict=True):
        assert torch.equal(view, source)


def test_the_thread_beside_training_yields_to_it() -> None:
    sources = tensors(1)
    before = threading.enumerate()
    assert begun(sources, [torch.empty_like(sources[0])]).finish()
    (beside,) = [one for one in threading.enumerate() if one not in before]
    assert beside.native_id is not None
    nice = os.getpriority(os.PRIO_PROCESS, beside.native_id)
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert nice == min(ours + copying.YIELDS, NICE_MAX)
    # Such a thread does not interrupt an ordinary one when it wakes.
    assert os.sched_getscheduler(beside.native_id) == os.SCHED_BATCH


def test_small_tensors_are_copied_before_the_late_ones() -> None:
    counters = [torch.tensor(float(number)) for number in range(5)]
    odd = torch.arange(7, dtype=torch.int8)
    sources = [*tensors(), *counters, odd, torch.arange(100)]
    views = [torch.zeros_like(source) for source in sources]
    copier = Copier(views, threads=1)
    for _ in range(2):
        late = copier.copy(sources, addresses(sources[:2]))
        assert isinstance(late, copying.LateCopy)
        assert late.indices == [0, 1]
        for view, source in zip(views[2:], sources[2:], strict=True):
            assert torch.equal(view, source)
        assert late.finish()
        for source in sources:
            source.add_(1)
    copier.close()


def test_the_one_who_waits_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tensors()
    views = [torch.empty_like(source) for source in sources]
    with held_thread(monkeypatch) as may_run:
        copy = begun(sources, views)
        timer = threading.Timer(0.2, may_run.set)
        timer.start()
        assert copy.finish()
        timer.join()
    assert torch.equal(views[1], sources[1])


def fused_step(tensor: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.ones_like(parameter)
    before = parameter._version
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    # No version counter shows it.
    assert parameter._version == before


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda one: one.add_(1.0),
    "one number": lambda one: one[17].fill_(3.0),
    "through data": lambda one: one.data.mul_(0.99),
    "through numpy": lambda one: one.numpy().__iadd__(1.0),
    "by a fused optimizer": fused_step,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_before_the_copy_is_noticed(
    change: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tensors()
    views = [torch.empty_like(source) for source in sources]
    with held_thread(monkeypatch) as may_run:
        copy = begun([source.detach() for source in sources], views)
        change(sources[1])
        may_run.set()
        assert not copy.finish()


def test_a_tensor_with_other_memory_keeps_the_image_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(tensors(1)[0])
    then, views = parameter.detach().clone(), [torch.empty(NUMBERS)]
    with held_thread(monkeypatch) as may_run:
        copy = begun([parameter.detach()], views)
        parameter.data = torch.zeros(NUMBERS)
        may_run.set()
        assert copy.finish()
    assert torch.equal(views[0], then)


def test_a_cancelled_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_thread(monkeypatch) as may_run:
        sources = tensors()
        copy = begun(sources, [torch.empty_like(source) for source in sources])
        may_run.set()
        copy.cancel()
    assert copy.is_done


def test_only_plain_large_steady_tensors_are_copied_late() -> None:
    with torch.inference_mode():
        inference = torch.ones(NUMBERS)
    large, other = tensors()
    turned = torch.ones(2000, 1000).t()
    small = torch.ones(LATE_BYTES_MIN // 4 - 1)
    sources = [large, other, turned, small, inference]
    views = [torch.empty(source.shape) for source in sources]
    copier = Copier(views, threads=1)
    copy = copier.copy(sources, addresses([large, turned, small, inference]))
    assert isinstance(copy, copying.LateCopy)
    assert copy.indices == [0]
    assert copy.finish()
    assert all(map(torch.equal, views, sources))
    assert copier.copy(sources, ()) is None


def test_a_small_state_is_copied_at_once() -> None:
    sources = [torch.ones(LATE_BYTES_MIN) for _ in range(3)]
    copier = Copier([torch.empty_like(source) for source in sources], threads=1)
    assert copier.copy(sources, addresses(sources)) is None


@pytest.mark.parametrize("at", [0, 12_345, NUMBERS - 1])
def test_the_trial_sees_each_byte(at: int) -> None:
    sources = tensors()
    copier = Copier([torch.empty_like(source) for source in sources], threads=1)
    trial = copier.copy(sources, addresses(sources), is_trial=True)
    assert isinstance(trial, copying.Trial)
    assert trial.finish()
    sources[1].data[at] += 1
    assert not trial.finish()
