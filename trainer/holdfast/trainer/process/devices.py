"""Accelerators: streams, events, copies, page-locked memory, random generators.

Every call to a device is in this module, by the names that torch has for all of them. So CUDA, ROCm
(which torch calls `cuda` too) and XPU run the same code. Only page-locking memory that exists
already differs: torch offers it for CUDA and ROCm alone.

Copies from a device run on the device's current stream, which is the program's own. Temporary
memory of a copy then belongs to the same pool as the program's, and a kernel that the program
queues later cannot overtake the copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Final

import torch

CPU: Final = torch.device("cpu")
# The types whose copies can run in the background. Copies from any other device return when they
# are done, which needs no call of this module.
STREAMED: Final = frozenset({"cuda", "xpu"})
_CUDA: Final = "cuda"
# cudaHostRegisterPortable: page-locked for every device, not only for the current one.
_HOST_REGISTER_PORTABLE: Final = 1


def is_streamed(device: torch.device) -> bool:
    """Return True if copies from `device` can run in the background."""
    return device.type in STREAMED


def find(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of the first tensor on a device with streams, or None."""
    return next((each.device for each in tensors if is_streamed(each.device)), None)


def own(number: int) -> torch.device:
    """Return device `number` of this machine, made the current one, or the CPU without devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not is_streamed(accelerator):
        return CPU
    device = torch.device(accelerator.type, number)
    enter(device)
    return device


def in_use() -> torch.device:
    """Return the current device of this thread, or the CPU if the program uses no other."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not is_streamed(accelerator):
        return CPU
    # Asking a device that the program does not use would open a context on it.
    if not torch.get_device_module(accelerator).is_initialized():
        return CPU
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def enter(device: torch.device) -> None:
    """Make `device` the current one of this thread.

    A new thread's device is number 0. A call that needs a device would open a context there, in
    every rank of the node.
    """
    torch.accelerator.set_device_index(device)


# --- copies -------------------------------------------------------------------------------


def synchronize(devices: Collection[torch.device]) -> None:
    """Wait for all work queued on these devices, on every stream."""
    for device in devices:
        torch.accelerator.synchronize(device)


def begin_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy from a device into CPU memory. Until it is complete, `target` has no values.

    The copy follows the work queued on the current stream of the source's device. `target` is
    contiguous and of the source's type: otherwise, torch would convert it before its bytes arrive.
    """
    # For the same reason the device resolves the bits of a conjugate or a negative view. torch
    # would change `target` immediately, on the CPU.
    # Into memory that is not page-locked, the copy is complete when the call returns.
    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Wait for the copies that this thread has begun from `device`."""
    torch.accelerator.current_stream(device).synchronize()


def mark(device: torch.device) -> torch.Event:
    """Return an event that is complete after all work queued on the device's current stream."""
    return torch.accelerator.current_stream(device).record_event()


# --- page-locked memory -------------------------------------------------------------------


def landing(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return CPU memory for copies from or to a device, page-locked if the driver allows it.

    torch keeps the pages for the next call, until `release_landings`.
    """
    try:
        return torch.empty(shape, dtype=dtype, device=CPU, pin_memory=True)
    except RuntimeError:
        # The limit of locked memory. Other memory is slower but correct.
        return torch.empty(shape, dtype=dtype, device=CPU)


def release_landings() -> None:
    """Return page-locked memory that is no longer in use to the system."""
    # torch 2.10 lacks the function, and then keeps the memory.
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if release is not None and torch.accelerator.is_available():
        release()


def page_lock(memory: torch.Tensor, device: torch.device) -> int:
    """Page-lock existing memory for copies from devices of the type of `device`.

    Returns its address, or 0 if it stays as it is. Copies are then slower but correct. Uses
    the thread's current device, see `enter`.
    """
    # torch has no such call for other devices (XPU), see the text of this module.
    if device.type != _CUDA:
        return 0
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, memory.numel(), _HOST_REGISTER_PORTABLE)
    return address if int(status) == 0 else 0


def page_unlock(address: int) -> None:
    """Undo `page_lock`, with the address that it returned."""
    if address:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


# --- random generators --------------------------------------------------------------------


def generator_states() -> dict[str, torch.Tensor]:
    """Return the states of all devices' generators by device type; none before their first use.

    A row per device, beginning with the current one: ranks with a device each save the same form,
    and a rank that resumes on another device of its node continues with its own state.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    module = torch.get_device_module(accelerator)
    # MPS has no such function: it has one device and no state before its first use.
    if not getattr(module, "is_initialized", module.is_available)():
        return {}
    rows = [module.get_rng_state(index) for index in _ring(module)]
    return {accelerator.type: torch.stack(rows)}


def set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to `generator_states` of this or another process.

    States of devices that this process does not have are left out.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in states:
        return
    module = torch.get_device_module(accelerator)
    rows = states[accelerator.type].cpu()
    if rows.dim() == 1:
        # An older version saved the state of the current device alone.
        rows = rows[None]
    for index, row in zip(_ring(module), rows, strict=False):
        module.set_rng_state(row.contiguous(), index)


def _ring(module: ModuleType) -> list[int]:
    """Return the numbers of all devices, from the current one on."""
    current, count = torch.accelerator.current_device_index(), module.device_count()
    return [(current + offset) % count for offset in range(count)]
