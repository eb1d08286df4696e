"""Copies into staging slots: the devices and the order of the calls to the CUDA runtime."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.trainer.staging import stage
from holdfast.trainer.staging.allocator import Allocator
from holdfast.trainer.staging.copying import Copier
from holdfast.trainer.staging.slots import Slot

ALL_S = 10.0


@dataclass
class FakeStream:
    """A CUDA stream that records the operations that have run before each point."""

    device: torch.device
    done: set[str] = field(default_factory=set)

    def run(self, name: str) -> None:
        self.done = {*self.done, name}

    def wait_event(self, event: FakeEvent) -> None:
        self.done = self.done | event.seen

    def synchronize(self) -> None:
        RUNTIME.host |= self.done


class FakeEvent:
    """A CUDA event: it remembers everything queued on its stream before `record`."""

    seen: frozenset[str] = frozenset()

    def record(self, stream: FakeStream) -> None:
        self.seen = frozenset(stream.done)


@dataclass
class FakeRuntime:
    """A fake `torch.cuda` with the documented rules of streams, events and the current device."""

    host: set[str] = field(default_factory=set)
    current: dict[torch.device, FakeStream] = field(default_factory=dict)
    after: dict[str, frozenset[str]] = field(default_factory=dict)
    streams: list[FakeStream] = field(default_factory=list)
    thread: threading.local = field(default_factory=threading.local)
    registered: list[tuple[int, int, int]] = field(default_factory=list)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current.setdefault(device, FakeStream(device))

    def new_stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before

    def set_device(self, device: torch.device) -> None:
        self.thread.device = device.index

    def host_register(self, address: int, size: int, flags: int) -> int:
        self.registered.append((getattr(self.thread, "device", 0), size, flags))
        return 0


RUNTIME = FakeRuntime()


class FakeSource:
    """A GPU tensor that a kernel on its device's current stream is still computing."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, torch.device(device)
        RUNTIME.current_stream(self.device).run(f"kernel of {name}")


class FakeView:
    """A view of a slot. A copy is queued on the current stream of the source's device."""

    nbytes = 4
    dtype = torch.float32

    def data_ptr(self) -> int:
        return 0

    def copy_(self, source: FakeSource, *, non_blocking: bool) -> None:
        assert non_blocking
        stream = RUNTIME.current_stream(source.device)
        RUNTIME.after[source.name] = frozenset(stream.done)
        stream.run(f"copy of {source.name}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    global RUNTIME
    RUNTIME = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", RUNTIME.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", RUNTIME.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", RUNTIME.current_stream)
    monkeypatch.setattr(torch.cuda, "set_device", RUNTIME.set_device)
    calls = SimpleNamespace(cudaHostRegister=RUNTIME.host_register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    return RUNTIME


def test_copies_from_every_device_follow_its_kernels_and_are_waited_for(
    runtime: FakeRuntime,
) -> None:
    devices = ["cuda:1", "cuda:3", "cuda:1", "cuda:0"]
    copier = Copier([FakeView() for _ in devices], threads=1)  # type: ignore[misc]
    for save in range(2):
        sources: list[Any] = [FakeSource(f"{save}-{i}", d) for i, d in enumerate(devices)]
        copier.copy(sources)
        for source in sources:
            assert f"kernel of {source.name}" in runtime.after[source.name]
            assert f"copy of {source.name}" in runtime.host
    # One stream per device, reused by the next save.
    assert sorted(stream.device.index for stream in runtime.streams) == [0, 1, 3]
    copier.close()


def test_copies_are_waited_for_when_one_of_them_fails(runtime: FakeRuntime) -> None:
    source = FakeSource("weight", "cuda:0")
    views: list[Any] = [FakeView(), torch.zeros(3)]
    copier = Copier(views, threads=1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        copier.copy([source, torch.zeros(5)])  # type: ignore[list-item]
    assert "copy of weight" in runtime.host
    copier.close()


def test_slots_are_page_locked_by_a_thread_on_the_ranks_own_device(
    runtime: FakeRuntime,
) -> None:
    staged = SimpleNamespace(
        slot=SimpleNamespace(allocated_bytes=1 << 40, map_pages=lambda a, b: 0)
    )
    memory = torch.zeros(100, dtype=torch.uint8)
    staged.pin = lambda: stage._pin(memory)
    played = SimpleNamespace(slots=[staged], _is_closed=threading.Event())
    work = (played, 100, torch.device("cuda", 5))
    thread = threading.Thread(target=stage.Stage._make_ready, args=work)
    thread.start()
    thread.join(ALL_S)
    assert runtime.registered == [(5, 100, 1)]


def test_allocation_for_a_slot_closed_meanwhile_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    closed, other = Slot(Slot.create(1 << 20)), Slot(Slot.create(1 << 20))
    closed.close()
    allocator = Allocator()
    before = set(threading.enumerate())
    allocator.begin([closed, other], 1 << 20)
    for thread in set(threading.enumerate()) - before:
        thread.join(ALL_S)
    assert raised == []
    assert other.allocated_bytes > 1 << 20
    other.close()
