"""Copies from GPUs into staging slots: consistent values, every device, page-locked memory."""

from __future__ import annotations

import importlib
import os
import threading

import torch

from holdfast.trainer.process import devices
from holdfast.trainer.slots.slots import Slot
from holdfast.trainer.staging.copying import Copier

# About 50 ms of a kernel that only waits, on any GPU since 2016.
BUSY_CYCLES = 100_000_000
NUMBERS = 1 << 20
SAVES = 20
ALL_S = 60.0


def keep_busy(device: torch.device) -> None:
    """Queue a long kernel on the device's current stream."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def views_for(count: int) -> list[torch.Tensor]:
    return [torch.zeros(NUMBERS) for _ in range(count)]


def test_copy_sees_earlier_kernels_and_no_later_ones(device: torch.device) -> None:
    source = torch.zeros(NUMBERS, device=device)
    (view,) = views = views_for(1)
    copier = Copier(views, threads=1)
    for save in range(1, SAVES + 1):
        keep_busy(device)
        source.fill_(save)
        copier.copy([source])
        # Queued immediately, like the next optimizer step.
        source.fill_(-1)
        assert bool((view == save).all()), f"save {save} has other values"
    copier.close()


def test_copy_is_ordered_on_the_programs_current_stream(gpu: torch.device) -> None:
    own = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    source = torch.zeros(NUMBERS, device=gpu)
    torch.cuda.synchronize(gpu)
    (view,) = views = views_for(1)
    copier = Copier(views, threads=1)
    with torch.cuda.stream(own):
        for save in range(1, SAVES + 1):
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            source.fill_(save)
            copier.copy([source])
            assert bool((view == save).all())
    copier.close()


def test_copy_follows_kernels_on_streams_that_nobody_waits_for(gpu: torch.device) -> None:
    other = torch.Stream(gpu)
    source = torch.zeros(NUMBERS, device=gpu)
    torch.accelerator.synchronize(gpu)
    (view,) = views = views_for(1)
    copier = Copier(views, threads=1)
    for save in range(1, SAVES + 1):
        with other:
            keep_busy(gpu)
            source.fill_(save)
        copier.copy([source])
        assert bool((view == save).all())
    copier.close()


def test_temporary_memory_of_a_copy_serves_the_program_afterwards(gpu: torch.device) -> None:
    """A channels-last tensor is copied through memory of the GPU in the order of its shape."""
    side = 1 << 12
    source = torch.zeros(1, 4, side, side, device=gpu).contiguous(memory_format=torch.channels_last)
    (view,) = views = [torch.ones(source.shape)]
    copier = Copier(views, threads=1)
    copier.copy([source])
    assert bool((view == 0).all())
    copier.close()
    held = torch.accelerator.memory_reserved(gpu)
    # The pool of the program's own stream has it now.
    again = torch.empty_like(source)
    assert torch.accelerator.memory_reserved(gpu) == held
    del again


def test_copy_waits_for_all_devices_of_the_process(
    two_gpus: tuple[torch.device, torch.device],
) -> None:
    places = [*two_gpus, torch.device("cpu")]
    sources = [torch.zeros(NUMBERS, device=device) for device in places]
    views = views_for(len(places))
    copier = Copier(views, threads=2)
    for save in range(1, SAVES + 1):
        for device, source in zip(places, sources, strict=True):
            # The devices finish at different times.
            keep_busy(device)
            source.fill_(save)
        copier.copy(sources)
        for source in sources:
            source.fill_(-1)
        for device, view in zip(places, views, strict=True):
            assert bool((view == save).all()), f"{device} at save {save}"
    copier.close()


def test_unusual_tensors_are_copied_exactly(device: torch.device) -> None:
    whole = torch.arange(64.0, device=device).view(8, 8)
    sources = [
        whole.t(),
        whole[:, 1:3],
        whole.to(torch.bfloat16),
        whole.view(2, 2, 4, 4).contiguous(memory_format=torch.channels_last),
        complex_on(device).conj(),
        # The imaginary part of a conjugate has the bit of a negative.
        complex_on(device).conj().imag,
        torch.empty(0, device=device),
        torch.tensor(5.0, device=device),
    ]
    views = [torch.zeros(s.shape, dtype=s.dtype) for s in sources]
    copier = Copier(views, threads=1)
    copier.copy(sources)
    for view, source in zip(views, sources, strict=True):
        assert torch.equal(view, source.cpu().resolve_conj().resolve_neg())
    copier.close()


def complex_on(device: torch.device) -> torch.Tensor:
    return torch.view_as_complex(torch.arange(64.0, device=device).view(8, 4, 2))


def test_conjugates_arrive_resolved_in_page_locked_memory(gpu: torch.device) -> None:
    """A late copy must not be conjugated before its bytes are there."""
    sources = [torch.randn(NUMBERS, dtype=torch.complex64, device=gpu).conj() for _ in range(2)]
    sources[1] = sources[1].conj()
    both = [sources[0], sources[1], sources[0].imag]
    views = [torch.zeros(s.shape, dtype=s.dtype, pin_memory=True) for s in both]
    copier = Copier(views, threads=1)
    for save in range(SAVES):
        keep_busy(gpu)
        copier.copy(both)
        for view, source in zip(views, both, strict=True):
            assert torch.equal(view, source.cpu().resolve_conj().resolve_neg()), save
    copier.close()


def test_slot_is_page_locked_and_released(gpu: torch.device) -> None:
    handle = Slot.create(NUMBERS * 4)
    slot = Slot(handle)
    os.close(handle)
    memory = torch.frombuffer(slot.data, dtype=torch.uint8)
    address = devices.page_lock(memory, gpu)
    assert address == memory.data_ptr(), "the driver declined to page-lock a memory file"
    assert memory.is_pinned()
    (view,) = views = [memory[: NUMBERS * 4].view(torch.float32)]
    copier = Copier(views, threads=1)
    copier.copy([torch.full((NUMBERS,), 7.0, device=gpu)])
    assert bool((view == 7).all())
    copier.close()
    devices.page_unlock(address)
    assert not memory.is_pinned()


def test_page_locking_in_a_thread_creates_no_context_on_another_gpu(
    two_gpus: tuple[torch.device, torch.device],
) -> None:
    """A CUDA context takes hundreds of megabytes, which the GPU's own rank needs."""
    first, second = two_gpus
    torch.cuda.set_device(second)
    torch.zeros(1, device=second)
    memory = torch.zeros(1 << 24, dtype=torch.uint8)
    before = torch.cuda.mem_get_info(second)[0]
    done: list[int] = []

    def work() -> None:
        devices.enter(second)
        done.append(devices.page_lock(memory, second))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(ALL_S)
    assert done[0] == memory.data_ptr()
    assert before - torch.cuda.mem_get_info(second)[0] < 64 << 20
    assert os.getpid() not in processes_on(first)
    devices.page_unlock(done[0])
    torch.cuda.set_device(first)


def processes_on(device: torch.device) -> set[int]:
    """The processes with a context on a device, according to NVML."""
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()
