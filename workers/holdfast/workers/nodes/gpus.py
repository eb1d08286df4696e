"""NVML's data on this node's GPUs: memory, utilisation, temperature, ECC and Xid errors.

The driver of a failed GPU can block its callers. So a separate thread calls NVML, and `beats`
returns its last answer. Without `/dev/nvidiactl` or `nvidia-ml-py` there is no data.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.bounds import ByteCount, Count, Name, Number
from holdfast.contracts.records.attempt import Document

CONTROL: Final = Path("/dev/nvidiactl")
MODULE: Final = "pynvml"
EVERY_S: Final = 2.0
STOP_WAIT_S: Final = 2.0
XIDS_KEPT: Final = 4


class GpuBeat(Document):
    """One GPU. A value is None if the GPU does not report it. `xids` are its newest errors."""

    index: Number
    uuid: Name = ""
    memory_used_bytes: ByteCount | None = None
    memory_total_bytes: ByteCount | None = None
    utilisation_percent: Number | None = None
    temperature_c: Number | None = None
    ecc_uncorrected: Count | None = None
    xids: tuple[Number, ...] = ()


class GpuWatch:
    """Reads NVML every `EVERY_S` seconds."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module `pynvml`."""
        self._nvml = nvml
        self._last: tuple[GpuBeat, ...] = ()
        self._xids: dict[str, list[int]] = {}
        self._events: Any = None
        self._over = threading.Event()
        # A separate thread, because the driver of a failed GPU can block its caller for ever.
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def beats(self) -> tuple[GpuBeat, ...]:
        """Return the last data by index; empty before the first reading and if NVML fails."""
        return self._last

    def close(self) -> None:
        self._over.set()
        # Bounded, because the thread may be blocked in the driver. It is a daemon.
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        # A failing driver only removes this data.
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            try:
                self._watch()
            finally:
                self._nvml.nvmlShutdown()
        self._last = ()

    def _watch(self) -> None:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(self._ask(nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
        self._register_events(handles)
        while True:
            self._read_events()
            pairs = zip(handles, uuids, strict=True)
            self._last = tuple(self._beat(i, *pair) for i, pair in enumerate(pairs))
            if self._over.wait(EVERY_S):
                return

    def _register_events(self, handles: list[Any]) -> None:
        """Register for Xid errors, which are events; some drivers and virtual GPUs lack them."""
        nvml = self._nvml
        self._events = self._ask(nvml.nvmlEventSetCreate)
        for handle in handles:
            if self._events is not None:
                kind = nvml.nvmlEventTypeXidCriticalError
                self._ask(nvml.nvmlDeviceRegisterEvents, handle, kind, self._events)

    def _read_events(self) -> None:
        """Read the new Xid errors and keep the last `XIDS_KEPT` of each GPU."""
        for _ in range(XIDS_KEPT if self._events is not None else 0):
            # Without new events NVML returns its error "timeout".
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                return
            uuid = _text(self._ask(self._nvml.nvmlDeviceGetUUID, event.device))
            known = [*self._xids.get(uuid, []), int(event.eventData)]
            self._xids[uuid] = known[-XIDS_KEPT:]

    def _beat(self, index: int, handle: Any, uuid: str) -> GpuBeat:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        temperature_c = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return GpuBeat(
            index=index,
            uuid=uuid,
            memory_used_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            utilisation_percent=int(used.gpu) if used else None,
            temperature_c=temperature_c,
            ecc_uncorrected=self._ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            xids=tuple(self._xids.get(uuid, ())),
        )

    def _ask(self, function: Any, *arguments: Any) -> Any:
        """Return NVML's answer, or None if this GPU or driver does not support the call."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def watch_gpus() -> GpuWatch | None:
    """Return a watch of this node's GPUs; None without GPUs or without NVML's module."""
    if not CONTROL.exists():
        return None
    try:
        return GpuWatch(importlib.import_module(MODULE))
    except ImportError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
