"""Accelerators for tests on a machine without one: late copies, poisoned memory, counted pins.

`machine` gives torch some devices of a type such as `cuda` or `xpu`. Only torch's own functions are
replaced. A tensor of a device is a tensor of the CPU that says otherwise.

Kernels are done when they are called, except those of `later`. Copies between CPU memory and a
device arrive as late as torch allows: when the host waits for their stream, for their device or
for an event, or when it has asked an event twice. Until then the target has poison in it. The bytes
that arrive are those in the source's memory at that time, except that later calls on the same
stream come later. Memory that is released belongs to the stream that it was made on, which may use
it again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

POISON = 0x2B
STATE_BYTES = 16
DEVICE_ADDRESS = 1 << 62
FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_strided", "scalar_tensor"),
)
MACHINE: Machine | None = None
# torch collects them at the first call, which must see its own functions.
CONSTRUCTORS = _device_constructors()


class Block:
    """The memory of a tensor. `made_on` is the stream whose pool it belongs to."""

    def __init__(self, made_on: Stream) -> None:
        self.made_on = made_on


class Stream:
    """A queue of one device. Operations have two halves: the device's, and the arrival."""

    def __init__(self, device: Any = None, *, priority: int = 0) -> None:
        self.device = torch.device(device) if device is not None else the_machine().current_device
        self.device_index = self.device.index
        the_machine().streams.append(self)
        self.operations: list[Operation] = []

    def run(self, stop: int | None = None) -> None:
        """Let the device do its half of the first `stop` operations."""
        for operation in self.operations[:stop]:
            operation.run()

    def arrive(self, stop: int | None = None) -> None:
        """Finish the first `stop` operations. The device's other streams may have gone ahead."""
        for operation in self.operations[:stop]:
            operation.run()
            operation.arrive()

    def synchronize(self) -> None:
        self.arrive()

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Event) -> None:
        self.operations.append(Wait(event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device.type)
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        played = the_machine()
        self._before = played.current_device_index(), played.current_stream(self.device)
        played.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        index, stream = self._before
        the_machine().set_stream(stream)
        the_machine().set_device_index(index)


class Event:
    """Remembers a place in a stream. The first question is always too early."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self._place, self._asked = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        machine = the_machine()
        self._stream = stream or machine.current_stream(machine.current_device)
        self._place = len(self._stream.operations)

    def query(self) -> bool:
        if self._stream is None or not self._pending():
            return True
        self._asked += 1
        if self._asked > 1:
            self.synchronize()
        return self._asked > 1

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.arrive(self._place)

    def run(self) -> None:
        if self._stream is not None:
            self._stream.run(self._place)

    def _pending(self) -> bool:
        assert self._stream is not None
        return not all(each.has_arrived for each in self._stream.operations[: self._place])


class Operation:
    has_run = has_arrived = False

    def run(self) -> None:
        if not self.has_run:
            self.has_run = True
            self.do()

    def arrive(self) -> None:
        if not self.has_arrived:
            self.has_arrived = True
            self.finish()

    def do(self) -> None:
        """The device's half."""

    def finish(self) -> None:
        """What the host sees after it has waited."""


class Kernel(Operation):
    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do  # type: ignore[method-assign,assignment]


class Wait(Operation):
    def __init__(self, event: Event) -> None:
        self.do, self.finish = event.run, event.synchronize  # type: ignore[method-assign]


class Copy(Operation):
    """A copy from a device into memory of the CPU, of the bytes as they are."""

    def __init__(self, target: torch.Tensor, source: DeviceTensor, stream: Stream) -> None:
        self._target, self._raw, self._stream = raw(target), raw(plain(source)), stream
        self._block, self._made_on = weakref.ref(source.block), source.block.made_on
        self._read: torch.Tensor | None = None
        self._target.copy_(poison_like(self._target))

    def do(self) -> None:
        is_reused = self._block() is None and self._made_on is not self._stream
        self._read = poison_like(self._raw) if is_reused else self._raw.clone()

    def finish(self) -> None:
        assert self._read is not None
        self._target.copy_(self._read)


class DeviceTensor(torch.Tensor):
    """A tensor whose `device` is one of the machine's."""

    block: Block
    on: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.on.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        """An address that can be compared. If the host uses it, the process ends."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.data_ptr(self) | DEVICE_ADDRESS

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = the_machine().wrap(plain(self).detach().clone(), self.on)
        return copied.requires_grad_(self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return the_machine().call(func, args, kwargs or {})


class Machine:
    """The devices, as `torch.accelerator` and its relatives describe them."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self.streams: list[Stream] = []
        self.is_initialized = True
        # By device: bytes that its thread page-locked, and what happened there.
        self.pins: Counter[int] = Counter()
        self.registered: dict[int, int] = {}
        self.landings = 0
        self.contexts: set[int] = set()
        self.generators = [bytes([number] * STATE_BYTES) for number in range(count)]
        self._thread = threading.local()
        self._default: dict[int, Stream] = {}

    # --- torch.accelerator ----------------------------------------------------------------

    @property
    def current_device(self) -> torch.device:
        return torch.device(self.kind, self.current_device_index())

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return torch.device(self.kind)

    def current_device_index(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device_index(self, device: Any) -> None:
        self._thread.index = self.index_of(device)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        if index not in self._default:
            self._default[index] = Stream(torch.device(self.kind, index))
        current: dict[int, Stream] = self._thread.__dict__.setdefault("streams", {})
        return current.get(index, self._default[index])

    def set_stream(self, stream: Stream) -> None:
        self._thread.__dict__.setdefault("streams", {})[stream.device.index] = stream
        self._thread.index = stream.device.index

    def synchronize(self, device: Any = None) -> None:
        index = self.index_of(device)
        for stream in [each for each in self.streams if each.device.index == index]:
            stream.arrive()

    def empty_host_cache(self) -> None:
        self.landings = 0

    def index_of(self, device: Any) -> int:
        if device is None or isinstance(device, int):
            return self.current_device_index() if device is None else device
        given = torch.device(device)
        assert given.type == self.kind, f"{given} is not of the current accelerator {self.kind}"
        assert given.index is None or given.index < self.count, f"there is no {given}"
        return self.current_device_index() if given.index is None else given.index

    # --- page-locked memory ---------------------------------------------------------------

    def cudart(self) -> SimpleNamespace:
        assert self.kind == "cuda", f"the CUDA runtime was called on a machine with {self.kind}"
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._release)

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 1, "not page-locked for every device"
        self.contexts.add(self.current_device_index())
        self.pins[self.current_device_index()] += 1
        self.registered[address] = size
        return 0

    def _release(self, address: int) -> int:
        del self.registered[address]
        return 0

    # --- generators -----------------------------------------------------------------------

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            is_initialized=lambda: self.is_initialized,
            is_available=lambda: True,
            device_count=lambda: self.count,
            get_rng_state=self._state_of,
            set_rng_state=self._set_state,
        )

    def draw(self, index: int) -> bytes:
        """Draw from a device's generator."""
        state = self.generators[index]
        self.generators[index] = bytes([(state[0] + 1) % 256, *state[1:]])
        return self.generators[index]

    def _state_of(self, device: Any) -> torch.Tensor:
        state = bytearray(self.generators[self.index_of(device)])
        return torch.frombuffer(state, dtype=torch.uint8)

    def _set_state(self, state: torch.Tensor, device: Any) -> None:
        assert state.dtype is torch.uint8
        assert state.shape == (STATE_BYTES,)
        self.generators[self.index_of(device)] = bytes(state.tolist())

    # --- tensors --------------------------------------------------------------------------

    def wrap(self, tensor: torch.Tensor, device: Any, block: Block | None = None) -> DeviceTensor:
        """Return a tensor of the CPU as one of `device`."""
        device = torch.device(device)
        device = torch.device(self.kind, self.index_of(device))
        with torch._C.DisableTorchFunctionSubclass():
            made = tensor.as_subclass(DeviceTensor)
        made.on = device
        made.block = block or Block(self.current_stream(device))
        return made

    def later(self, tensor: torch.Tensor, value: float) -> None:
        """Queue a kernel on the current stream that fills a tensor, and has not run yet."""
        assert isinstance(tensor, DeviceTensor)
        memory = plain(tensor).detach()
        kernel = Kernel(lambda: memory.fill_(value))
        self.current_stream(tensor.on).operations.append(kernel)

    def poison(self, *tensors: torch.Tensor) -> None:
        """Overwrite tensors now, as a stream or a process that waits for nothing may."""
        for tensor in tensors:
            memory = raw(plain(tensor).detach())
            memory.copy_(poison_like(memory))

    def factory(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `real`, which makes a tensor, with the machine's devices."""

        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            wanted = device if device is not None or context is None else context.device
            if wanted is not None and torch.device(wanted).type == self.kind:
                return self.wrap(real(*args, device="cpu", **kwargs), wanted)
            if not pin_memory:
                return real(*args, device=device, **kwargs)
            assert torch.device(wanted or "cpu").type == "cpu", "only memory of the CPU is locked"
            tensor = real(*args, device="cpu", **kwargs)
            self.landings += 1
            return tensor.copy_(poison_like(tensor))

        return make

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what torch does when `func` is called with tensors of a device."""
        name = getattr(func, "__name__", "")
        if name == "copy_":
            return self._copy(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
        stream = self.current_stream(tensors[0].on)
        if name in {"cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__"}:
            stream.arrive()
            if name == "numpy":
                raise TypeError("a tensor of a device has no memory that NumPy could see")
            return getattr(plain(tensors[0]).clone(), name)()
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_"):
            stream.run()
        devices = {each.on for each in tensors if each.dim()}
        assert len(devices) < 2, f"{name} of tensors on {devices}"
        wanted, args, kwargs = take_device(name, args, kwargs)
        result = func(*args, **kwargs)
        if wanted is not None and wanted != tensors[0].on:
            # To another device or to the CPU, as a copy for which the host waits.
            stream.arrive()
            moved = plain(result).clone()
            return moved if wanted.type == "cpu" else self.wrap(moved, wanted)
        return tree_map_only(torch.Tensor, lambda each: self._like(each, tensors), result)

    def _like(self, result: torch.Tensor, tensors: list[DeviceTensor]) -> DeviceTensor:
        """Return a result as a tensor of the device of its arguments."""
        if isinstance(result, DeviceTensor):
            return result
        at = memory_of(result)
        shared = [each.block for each in tensors if at and memory_of(each) == at]
        return self.wrap(result, tensors[0].on, shared[0] if shared else None)

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        device = next(each.on for each in (source, target) if isinstance(each, DeviceTensor))
        stream = self.current_stream(device)
        if non_blocking and not isinstance(target, DeviceTensor):
            assert isinstance(source, DeviceTensor)
            self._copy_late(target, source, stream)
            return target
        stream.arrive()
        with torch.no_grad():
            plain(target).copy_(plain(source))
        return target

    def _copy_late(self, target: torch.Tensor, source: DeviceTensor, stream: Stream) -> None:
        """Queue a copy. What torch does to the target on the CPU, it does at once."""
        # torch converts the type and the order of the values on the device.
        straight, dense = plain(source).to(target.dtype), target.contiguous()
        straight = straight if straight.stride() == dense.stride() else straight.contiguous()
        if memory_of(straight) != memory_of(source):
            source = self.wrap(straight, source.on)
        stream.operations.append(Copy(dense, source, stream))
        if dense is not target:
            target.copy_(dense)
        if target.is_conj() != source.is_conj():
            target.conj_physical_()
        if target.is_neg() != source.is_neg():
            target.neg_()


def take_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """Return the device that a call names, and its arguments without it."""
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    if name == "to" and len(args) > 1 and isinstance(args[1], str | torch.device):
        device, args = args[1], (args[0], *args[2:])
        args = args if len(args) > 1 or kwargs else (args[0], args[0].dtype)
    return None if device is None else torch.device(device), args, kwargs


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor of the CPU."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, without the bits that change its meaning."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def memory_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def poison_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return values that are wrong: NaN, or a number that nobody expects."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return torch.full(tensor.shape, torch.nan if is_real else POISON, device="cpu").to(tensor.dtype)


def the_machine() -> Machine:
    assert MACHINE is not None
    return MACHINE


@contextlib.contextmanager
def machine(kind: str = "cuda", count: int = 2) -> Iterator[Machine]:
    """Give torch `count` devices of a type. Their tensors must not be used after the block."""
    global MACHINE
    MACHINE = made = Machine(kind, count)
    known_module = torch.get_device_module

    def module_of(device: Any = None) -> ModuleType | SimpleNamespace:
        is_ours = device is None or torch.device(device).type == kind
        return made.module() if is_ours else known_module(device)

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            *("current_accelerator", "current_device_index", "set_device_index", "synchronize"),
            *("current_stream", "set_stream", "empty_host_cache"),
        ):
            patch.setattr(torch.accelerator, name, getattr(made, name), raising=False)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "device_count", lambda: count)
        patch.setattr(torch, "get_device_module", module_of)
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.cuda, "cudart", made.cudart)
        for name in FACTORIES:
            patch.setattr(torch, name, made.factory(getattr(torch, name)))
        try:
            yield made
        finally:
            MACHINE = None
