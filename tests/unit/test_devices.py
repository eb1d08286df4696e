"""Devices, on a machine that tests play: late copies, several devices, streams, generators."""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fake_devices import (
    CONSTRUCTORS,
    STATE_BYTES,
    DeviceTensor,
    Machine,
    machine,
    the_machine,
)
from torch import nn

from holdfast.contracts.errors import NumericsError
from holdfast.trainer import Session
from holdfast.trainer.process import devices
from holdfast.trainer.staging.copying import Copier
from holdfast.trainer.state import rng

ALL_S = 30.0


@pytest.fixture(params=["cuda", "xpu"])
def played(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(request.param, count=3) as made:
        yield made
    torch.set_default_device(None)


@pytest.fixture
def cuda() -> Iterator[Machine]:
    with machine("cuda", count=3) as made:
        yield made
    torch.set_default_device(None)


def side_stream(played: Machine, index: int) -> torch.Stream:
    return torch.Stream(torch.device(played.kind, index))


def complex_on(device: str) -> torch.Tensor:
    numbers = torch.arange(8.0, device=device)
    return torch.view_as_complex(numbers.view(4, 2))


# --- orders that were in use, or that are easy to write: each gives wrong values here ----------


def test_a_source_that_is_changed_before_its_copy_has_arrived_is_noticed(played: Machine) -> None:
    source, view = torch.ones(4, device=f"{played.kind}:1"), torch.zeros(4)
    devices.begin_copy(view, source)
    # The order of a save that returned while its copies were in flight.
    played.poison(source)
    devices.finish_copies(source.device)
    assert not bool((view == 1).any())


def test_a_target_that_is_read_before_its_bytes_have_arrived_is_noticed(played: Machine) -> None:
    source, view = torch.ones(4, device=f"{played.kind}:1"), torch.zeros(4)
    devices.begin_copy(view, source)
    assert bool(view.isnan().all())
    devices.finish_copies(source.device)
    assert bool((view == 1).all())


def test_a_conjugate_that_torch_resolves_on_the_host_is_noticed(played: Machine) -> None:
    source = complex_on(f"{played.kind}:0").conj()
    view = torch.zeros(4, dtype=torch.complex64)
    view.copy_(source, non_blocking=True)
    devices.finish_copies(source.device)
    # torch conjugated what was there before the bytes.
    assert torch.equal(view, source.cpu().conj().resolve_conj())


def test_an_event_on_the_stream_of_another_device_is_noticed(played: Machine) -> None:
    source, view = torch.ones(1, device=f"{played.kind}:1"), torch.zeros(1)
    devices.begin_copy(view, source)
    arrival = torch.Event()
    arrival.record()
    assert arrival.query()
    assert bool(view.isnan())


def test_a_copy_on_a_stream_that_waits_for_nothing_is_noticed(played: Machine) -> None:
    source, view = torch.zeros(4, device=f"{played.kind}:1"), torch.zeros(4)
    played.later(source, 7.0)
    with side_stream(played, 1):
        devices.begin_copy(view, source)
        devices.finish_copies(source.device)
    assert bool((view == 0).all())


def test_a_kernel_on_a_stream_that_nobody_waits_for_is_noticed(played: Machine) -> None:
    source, view = torch.zeros(4, device=f"{played.kind}:1"), torch.zeros(4)
    with side_stream(played, 1):
        played.later(source, 7.0)
    # The order of a copy that follows only the current stream.
    devices.begin_copy(view, source)
    devices.finish_copies(source.device)
    assert bool((view == 0).all())


def test_temporary_memory_of_another_stream_is_noticed(played: Machine) -> None:
    whole, view = torch.ones(4, 4, device=f"{played.kind}:1"), torch.zeros(4, 4)
    temporary = whole * 2
    side = side_stream(played, 1)
    side.wait_stream(torch.accelerator.current_stream(whole.device))
    with side:
        devices.begin_copy(view, temporary)
    # The program's stream may use the memory again, while the side stream still reads it.
    del temporary
    side.synchronize()
    assert bool(view.isnan().all())


# --- copies into staging slots ------------------------------------------------------------------


def sources_on(kind: str) -> list[torch.Tensor]:
    """Tensors of all forms, on several devices and on the CPU."""
    first, second = f"{kind}:0", f"{kind}:2"
    grid = torch.arange(48.0, device=second).view(2, 3, 4, 2)
    return [
        torch.arange(6.0, device=first).view(2, 3),
        grid,
        grid.contiguous(memory_format=torch.channels_last),
        grid[0, 0].t(),
        grid[..., 1],
        complex_on(first).conj(),
        complex_on(second).conj(),
        # The imaginary part of a conjugate has the bit of a negative.
        complex_on(second).conj().imag,
        torch.arange(4.0, device=second).to(torch.bfloat16),
        torch.arange(5, device=first),
        torch.tensor([True, False], device=second),
        torch.tensor(5.0, device=first),
        torch.empty(0, device=first),
        torch.arange(7.0),
        complex_on("cpu").conj(),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_of_all_forms_and_devices_are_copied_exactly(played: Machine, threads: int) -> None:
    sources = sources_on(played.kind)
    assert sources[7].is_neg()
    views = [torch.zeros(s.shape, dtype=s.dtype) for s in sources]
    copier = Copier(views, threads)
    for save in range(2):
        expected = [s.cpu().clone().resolve_conj().resolve_neg() for s in sources]
        copier.copy(sources)
        played.poison(*(s for s in sources if isinstance(s, DeviceTensor)))
        for number, (view, want) in enumerate(zip(views, expected, strict=True)):
            assert torch.equal(view, want), f"save {save}, source {number}"
        sources = sources_on(played.kind)
    copier.close()


def test_copies_follow_the_kernels_of_every_stream(played: Machine) -> None:
    sources = [torch.zeros(4, device=f"{played.kind}:{index}") for index in (0, 1, 1, 2)]
    streams = [side_stream(played, source.device.index) for source in sources[:3]]
    views = [torch.zeros(4) for _ in sources]
    copier = Copier(views, threads=1)
    for save in range(1, 4):
        # The third stream is one that the program works on, and the fourth source's is its default.
        for source, stream in zip(sources, streams, strict=False):
            with stream:
                played.later(source, save)
        played.later(sources[3], save)
        with streams[2]:
            copier.copy(sources)
        played.poison(*sources)
        assert all(bool((view == save).all()) for view in views), save
    copier.close()


def test_copies_are_waited_for_when_one_of_them_fails(played: Machine) -> None:
    source = torch.ones(4, device=f"{played.kind}:1")
    views = [torch.zeros(4), torch.zeros(3)]
    copier = Copier(views, threads=1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        copier.copy([source, torch.zeros(5)])
    played.poison(source)
    assert bool((views[0] == 1).all())
    copier.close()


# --- a whole session ------------------------------------------------------------------------------


class Model(nn.Module):
    """Parts on two devices, one of them channels-last, and a conjugate."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = f"{kind}:1", f"{kind}:2"
        conv: Any = nn.Conv2d(3, 4, 3, device=self.first)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.linear = nn.Linear(4, 2, device=self.second)
        self.register_buffer("phase", complex_on(self.second).conj())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.conv(images).mean((2, 3))
        found: torch.Tensor = self.linear(seen.to(self.second))
        return found.pow(2).mean()


def train(
    folder: Path, kind: str, steps: int, *, nan_at: int = 0, late: torch.Stream | None = None
) -> dict[str, torch.Tensor]:
    """Train up to `steps` steps, and return the weights.

    A kernel of the program's start is still queued on the stream `late` when the session begins.
    """
    torch.manual_seed(0)
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if late is not None:
        with late:
            the_machine().later(model.linear.weight, -1.0)
    with Session(model, optimizer, directory=folder, interval=2) as session:
        if late is not None:
            late.synchronize()
        for step in session.steps(steps):
            images = torch.randn(2, 3, 5, 5, device=model.first)
            loss = model(images)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.observe(loss.detach() * (torch.nan if step == nan_at else 1.0))
            # The next step's kernels may use the memory of the loss.
            loss.detach().fill_(torch.nan)
    return {name: value.cpu() for name, value in model.state_dict().items() if name != "phase"}


@pytest.mark.more
@pytest.mark.parametrize(("kind", "default"), [("cuda", None), ("cuda", 1), ("xpu", 0)])
def test_a_run_on_several_devices_continues_exactly(
    kind: str, default: int | None, tmp_path: Path
) -> None:
    with machine(kind, count=3) as played:
        torch.accelerator.set_device_index(torch.device(kind, 1))
        torch.set_default_device(None if default is None else f"{kind}:{default}")
        try:
            whole = train(tmp_path / "whole", kind, 6)
            train(tmp_path / "cut", kind, 4)
            played.generators = [bytes(STATE_BYTES)] * 3
            played.landings = 0
            again = train(tmp_path / "cut", kind, 6, late=side_stream(played, 2))
        finally:
            torch.set_default_device(None)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    # Not what other processes left in the generators, but what the run saved of each.
    assert [state[0] for state in played.generators] == [0, 1, 2]
    # A thread locks the pages of the slots, and a thread's first device is number 0.
    assert played.pins == ({1: 6} if kind == "cuda" else {})
    assert played.contexts <= {1}
    assert played.registered == {}
    # What the resume read into is released. Two losses have landed since.
    assert played.landings == 2


def test_a_bad_loss_on_a_device_that_is_not_current_is_found(cuda: Machine, tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="step 4"):
        train(tmp_path / "bad", "cuda", 6, nan_at=4)


# --- generators -----------------------------------------------------------------------------------


def test_the_generators_of_all_devices_are_saved_and_restored(played: Machine) -> None:
    for index in range(3):
        played.draw(index)
    states = rng.capture()
    assert states[played.kind].shape == (3, STATE_BYTES)
    expected = [played.draw(index) for index in range(3)]
    blank = rng.empty_like_saved(states, lambda kind: states[kind].shape)
    for kind, tensor in blank.items():
        tensor.copy_(states[kind])
    rng.restore(blank)
    assert [played.draw(index) for index in range(3)] == expected
    rng.restore(states)
    assert rng.used_since(states) == []
    played.draw(2)
    assert rng.used_since(states) == [played.kind]


def test_a_rank_continues_with_its_own_generators_on_another_device(played: Machine) -> None:
    torch.accelerator.set_device_index(1)
    states = rng.capture()
    # The first row is that of the rank's own device, so all ranks save the same form.
    assert states[played.kind][:, 0].tolist() == [1, 2, 0]
    torch.accelerator.set_device_index(2)
    rng.restore(states)
    assert [state[0] for state in played.generators] == [2, 0, 1]
    with machine(played.kind, count=2) as smaller:
        rng.restore(states)
        assert [state[0] for state in smaller.generators] == [1, 2]


def test_an_older_checkpoint_has_the_state_of_the_current_device_alone(played: Machine) -> None:
    torch.accelerator.set_device_index(1)
    rng.restore({played.kind: rng.capture()[played.kind][1]})
    assert [state[0] for state in played.generators] == [0, 2, 2]


def test_devices_that_are_not_in_use_are_left_alone(played: Machine) -> None:
    played.is_initialized = False
    assert played.kind not in rng.capture()


# --- the default device ---------------------------------------------------------------------------


@pytest.fixture
def meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("meta")
def test_every_kind_of_state_resumes_with_another_default_device(tmp_path: Path) -> None:
    def run(steps: int) -> tuple[list[float], Any, float]:
        model = nn.Sequential(nn.Linear(4, 4, device="cpu"), nn.Linear(4, 1, device="cpu"))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
        generator, own = torch.Generator(device="cpu").manual_seed(3), np.random.default_rng(3)
        with torch.device("cpu"):
            ema = torch.optim.swa_utils.AveragedModel(model)
        step: Any = optimizer.step
        with Session(
            model,
            optimizer,
            directory=tmp_path / "r",
            interval=2,
            extra={"ema": ema, "held": Held()},
            per_rank={"generator": generator, "own": own},
        ) as session:
            inputs = torch.ones(2, 4, device="cpu")
            losses = []
            for _ in session.steps(steps):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = model(inputs).pow(2).mean()
                    loss.backward()  # type: ignore[no-untyped-call]
                    return loss

                losses.append(step(closure).item())
                ema.update_parameters(model)
                random.random()
                session.log(loss=losses[-1])
        return losses, generator.get_state(), own.random()

    run(4)
    losses, state, drawn = run(6)
    assert len(losses) == 2
    assert torch.equal(state, torch.Generator(device="cpu").manual_seed(3).get_state())
    assert drawn == np.random.default_rng(3).random()


class Held:
    """An extra with tensors, whose templates are new."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": torch.ones(3, device="cpu"), "array": np.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["numbers"].tolist() == [1.0, 1.0, 1.0]
        assert state_dict["array"].tolist() == [0, 1, 2]


# --- page-locking ---------------------------------------------------------------------------------


def test_memory_that_the_driver_does_not_lock_is_used_as_it_is(
    cuda: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    assert devices.landing((2, 3), torch.float16).shape == (2, 3)
    monkeypatch.setattr(cuda, "_register", lambda *_: 2)
    assert devices.page_lock(torch.zeros(8), torch.device("cuda", 1)) == 0
    devices.page_unlock(0)


def test_a_thread_locks_pages_on_the_device_that_it_enters(cuda: Machine) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    device = torch.device("cuda", 2)

    def work() -> None:
        devices.enter(device)
        devices.page_lock(memory, device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(ALL_S)
    assert cuda.pins == {2: 1}
    assert cuda.registered == {memory.data_ptr(): 100}
    devices.page_unlock(memory.data_ptr())


# --- one module -----------------------------------------------------------------------------------

TRAINER = Path(devices.__file__).parent
OF_DEVICES = {"accelerator", "cuda", "xpu", "mps", "Stream", "Event", "get_device_module"}
MAKES_TENSORS = {real.__name__ for real in CONSTRUCTORS}


def calls_in(path: Path) -> Iterator[tuple[str, int, ast.AST]]:
    """Every attribute of `torch` that a module names, with its line and the call, if it is one."""
    tree = ast.parse(path.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            yield node.attr, node.lineno, called.get(id(node), node)


def test_every_call_to_a_device_is_in_one_module() -> None:
    found = [
        f"{path.relative_to(TRAINER)}:{line}: torch.{name}"
        for path in sorted(TRAINER.rglob("*.py"))
        for name, line, _ in calls_in(path)
        # A type in a signature calls nothing.
        if name in OF_DEVICES and path.name != "devices.py" and name != "Event"
    ]
    assert found == []


def test_every_new_tensor_names_its_device() -> None:
    """Else the program's default device decides, as with `torch.set_default_device`."""
    found = [
        f"{path.relative_to(TRAINER)}:{line}: torch.{name}"
        for path in sorted(TRAINER.rglob("*.py"))
        for name, line, node in calls_in(path)
        if name in MAKES_TENSORS
        and isinstance(node, ast.Call)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
