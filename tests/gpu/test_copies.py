"""Copies from GPUs into staging slots: consistent values, every device, page-locked memory."""

from __future__ import annotations

import importlib
import os
import threading

import torch

from holdfast.trainer.staging import stage
from holdfast.trainer.staging.copying import Copier
from holdfast.trainer.staging.slots import Slot

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


def test_copy_waits_for_all_devices_of_the_process(
    two_gpus: tuple[torch.device, torch.device],
) -> None:
    devices = [*two_gpus, torch.device("cpu")]
    sources = [torch.zeros(NUMBERS, device=device) for device in devices]
    views = views_for(len(devices))
    copier = Copier(views, threads=2)
    for save in range(1, SAVES + 1):
        for device, source in zip(devices, sources, strict=True):
            # The devices finish at different times.
            keep_busy(device)
            source.fill_(save)
        copier.copy(sources)
        for source in sources:
            source.fill_(-1)
        for device, view in zip(devices, views, strict=True):
            assert bool((view == save).all()), f"{device} at save {save}"
    copier.close()


def test_unusual_tensors_are_copied_exactly(device: torch.device) -> None:
    whole = torch.arange(64.0, device=device).view(8, 8)
    sources = [
        whole.t(),
        whole[:, 1:3],
        whole.to(torch.bfloat16),
        torch.view_as_complex(whole.view(8, 4, 2).contiguous()).conj(),
        torch.empty(0, device=device),
        torch.tensor(5.0, device=device),
    ]
    views = [torch.zeros(s.shape, dtype=s.dtype) for s in sources]
    copier = Copier(views, threads=1)
    copier.copy(sources)
    for view, source in zip(views, sources, strict=True):
        assert torch.equal(view, source.cpu().resolve_conj())
    copier.close()


def test_slot_is_page_locked_and_released(gpu: torch.device) -> None:
    handle = Slot.create(NUMBERS * 4)
    slot = Slot(handle)
    os.close(handle)
    memory = torch.frombuffer(slot.data, dtype=torch.uint8)
    address = stage._pin(memory)
    assert address == memory.data_ptr(), "the driver declined to page-lock a memory file"
    assert memory.is_pinned()
    (view,) = views = [memory[: NUMBERS * 4].view(torch.float32)]
    copier = Copier(views, threads=1)
    copier.copy([torch.full((NUMBERS,), 7.0, device=gpu)])
    assert bool((view == 7).all())
    copier.close()
    assert unregister(address) == 0
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
        torch.cuda.set_device(second)
        done.append(stage._pin(memory))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(ALL_S)
    assert done[0] == memory.data_ptr()
    assert before - torch.cuda.mem_get_info(second)[0] < 64 << 20
    assert os.getpid() not in processes_on(first)
    assert unregister(done[0]) == 0
    torch.cuda.set_device(first)


def unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


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
