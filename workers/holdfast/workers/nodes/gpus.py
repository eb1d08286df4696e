"""NVML's data on this node's GPUs: memory, use, temperature, power, clocks and error counters.

The driver of a failed GPU can block its callers. So a separate thread calls NVML, and `beats`
returns its last answer. Without `/dev/nvidiactl` or `nvidia-ml-py` there is no data. Xid errors
come from NVML's events, and from the kernel's log where the driver has no such events.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.bounds import ByteCount, Count, Name, Number, Seconds
from holdfast.contracts.records.documents import Document
from holdfast.workers.nodes.visible_gpus import CONTROL

MODULE: Final = "pynvml"
EVERY_S: Final = 2.0
STOP_WAIT_S: Final = 2.0
XIDS_KEPT: Final = 4
# Links have dozens of counters, which change seldom.
LINKS_EVERY_S: Final = 30.0
LINKS_MAX: Final = 18
# NVML's numbers: of the error `GPU is lost`, the thermal policy, the clock of the SMs, and NVLink's
# counters of replays, recoveries and CRC errors.
_IS_LOST: Final = 15
_THERMAL: Final = 1
_SM: Final = 1
_LINK_COUNTERS: Final = (0, 1, 2)
LOG: Final = Path("/dev/kmsg")
RECORD_BYTES: Final = 8192
RECORDS_MAX: Final = 1000
_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,20})\): (\d{1,4})\b")
_PLACE: Final = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.\d)?")

Place = tuple[int, int, int]


def pci_place(text: str) -> Place | None:
    """Return the domain, bus and device of a PCI address, such as `0000:3b:00` or `…:3B:00.0`."""
    match = _PLACE.fullmatch(text)
    return (int(match[1], 16), int(match[2], 16), int(match[3], 16)) if match else None


def xids_in(text: str) -> list[tuple[Place, int]]:
    """Return the Xid errors in lines of the log: the GPU's PCI address, and the error's number."""
    found = []
    for match in _XID.finditer(text):
        if place := pci_place(match[1]):
            found.append((place, int(match[2])))
    return found


class KernelLog:
    """Reads what the kernel logs from now on. Without permission, it reads nothing."""

    def __init__(self, path: Path = LOG) -> None:
        self._handle: int | None = None
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read(self) -> list[tuple[Place, int]]:
        """Return the Xid errors since the last call."""
        text = ""
        for _ in range(RECORDS_MAX):
            if self._handle is None:
                break
            try:
                # Each read returns one record. If old ones were overwritten, it fails once.
                record = os.read(self._handle, RECORD_BYTES)
            except BrokenPipeError:
                continue
            except OSError:
                break
            if not record:
                break
            text += record.decode(errors="replace")
        return xids_in(text)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


class GpuBeat(Document):
    """One GPU. A value is None if the GPU does not report it.

    `xids` are its newest errors, of `xids_seen` since the watch began. The other errors are
    counters of the driver. `throttled_s` is how long heat has lowered the clock since the driver
    was loaded.
    """

    index: Number
    uuid: Name = ""
    memory_used_bytes: ByteCount | None = None
    memory_total_bytes: ByteCount | None = None
    utilisation_percent: Number | None = None
    temperature_c: Number | None = None
    power_w: Number | None = None
    ecc_uncorrected: Count | None = None
    xids: tuple[Number, ...] = ()
    xids_seen: Count = 0
    is_lost: bool | None = None
    remap_failed: bool | None = None
    nvlink_errors: Count | None = None
    nvlinks_down: Number | None = None
    pcie_replays: Count | None = None
    throttled_s: Seconds | None = None
    clock_mhz: Number | None = None
    clock_max_mhz: Number | None = None


class GpuWatch:
    """Reads NVML every `EVERY_S` seconds."""

    def __init__(self, nvml: Any, log: KernelLog | None = None) -> None:
        """`nvml` is the module `pynvml`, and `log` replaces the kernel's log."""
        self._nvml = nvml
        self._last: tuple[GpuBeat, ...] = ()
        self._xids: dict[str, list[int]] = {}
        self._links: dict[str, dict[str, int | None]] = {}
        self._links_at = -LINKS_EVERY_S
        self._uuids: dict[object, str] = {}
        self._events: Any = None
        self._log, self._places = log or KernelLog(), dict[tuple[int, int, int], str]()
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
                self._log.close()
                self._nvml.nvmlShutdown()
        self._last = ()

    def _watch(self) -> None:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(self._ask(nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
        # A GPU that is lost no longer says its UUID, and its last event must have one.
        self._uuids = {_key(handle): uuid for handle, uuid in zip(handles, uuids, strict=True)}
        self._register_events(handles, uuids)
        while True:
            self._read_events()
            if time.monotonic() - self._links_at >= LINKS_EVERY_S:
                self._links_at = time.monotonic()
                pairs = zip(handles, uuids, strict=True)
                self._links = {uuid: self._count_links(handle) for handle, uuid in pairs}
            pairs = zip(handles, uuids, strict=True)
            self._last = tuple(self._beat(i, *pair) for i, pair in enumerate(pairs))
            if self._over.wait(EVERY_S):
                return

    def _register_events(self, handles: list[Any], uuids: list[str]) -> None:
        """Register for Xid errors, which are events; some drivers and virtual GPUs lack them.

        Errors of such GPUs are read from the kernel's log, where that is allowed.
        """
        self._events = self._ask(self._nvml.nvmlEventSetCreate)
        for handle, uuid in zip(handles, uuids, strict=True):
            if self._has_events(handle):
                continue
            place = self._call("nvmlDeviceGetPciInfo", handle)
            if found := pci_place(_text(getattr(place, "busId", ""))):
                self._places[found] = uuid

    def _has_events(self, handle: Any) -> bool:
        nvml = self._nvml
        if self._events is None:
            return False
        try:
            kind = nvml.nvmlEventTypeXidCriticalError
            nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)
        except nvml.NVMLError:
            return False
        return True

    def _read_events(self) -> None:
        """Read the new Xid errors."""
        self._read_log()
        for _ in range(XIDS_KEPT if self._events is not None else 0):
            # Without new events NVML returns its error "timeout".
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                return
            uuid = self._uuids.get(_key(event.device), "")
            self._xids.setdefault(uuid, []).append(int(event.eventData))

    def _read_log(self) -> None:
        """Read the new Xid errors of the GPUs without events."""
        for place, xid in self._log.read() if self._places else ():
            if uuid := self._places.get(place):
                self._xids.setdefault(uuid, []).append(xid)

    def _count_links(self, handle: Any) -> dict[str, int | None]:
        """Return the errors of a GPU's NVLinks, the links that are down, and PCIe's replays."""
        state, count = "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter"
        errors, down, has_links = 0, 0, False
        for link in range(LINKS_MAX):
            is_up = self._call(state, handle, link)
            if is_up is None:
                break
            has_links, down = True, down + (not is_up)
            errors += sum(self._call(count, handle, link, which) or 0 for which in _LINK_COUNTERS)
        return {
            "nvlink_errors": errors if has_links else None,
            "nvlinks_down": down if has_links else None,
            "pcie_replays": self._call("nvmlDeviceGetPcieReplayCounter", handle),
        }

    def _beat(self, index: int, handle: Any, uuid: str) -> GpuBeat:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        temperature_c = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        remapped = self._call("nvmlDeviceGetRemappedRows", handle)
        heat = self._call("nvmlDeviceGetViolationStatus", handle, _THERMAL)
        power_mw = self._call("nvmlDeviceGetPowerUsage", handle)
        xids = self._xids.get(uuid, [])
        return GpuBeat(
            index=index,
            uuid=uuid,
            memory_used_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            utilisation_percent=int(used.gpu) if used else None,
            temperature_c=temperature_c,
            power_w=None if power_mw is None else round(power_mw / 1000),
            ecc_uncorrected=self._ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            xids=tuple(xids[-XIDS_KEPT:]),
            xids_seen=len(xids),
            is_lost=self._is_lost(handle),
            # Corrected and uncorrected rows, whether some wait for a reset, and a failure.
            remap_failed=bool(remapped[3]) if remapped else None,
            throttled_s=round(heat.violationTime / 1e9, 3) if heat else None,
            clock_mhz=self._call("nvmlDeviceGetClockInfo", handle, _SM),
            clock_max_mhz=self._call("nvmlDeviceGetMaxClockInfo", handle, _SM),
            **self._links.get(uuid, {}),
        )

    def _is_lost(self, handle: Any) -> bool | None:
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            return getattr(error, "value", None) == _IS_LOST or None
        return None

    def _ask(self, function: Any, *arguments: Any) -> Any:
        """Return NVML's answer, or None if this GPU or driver does not support the call."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a function that older modules may lack, or None."""
        function = getattr(self._nvml, name, None)
        return None if function is None else self._ask(function, *arguments)


def watch_gpus() -> GpuWatch | None:
    """Return a watch of this node's GPUs; None without GPUs or without NVML's module."""
    if not CONTROL.exists():
        return None
    try:
        return GpuWatch(importlib.import_module(MODULE))
    except ImportError:
        return None


def _key(handle: Any) -> object:
    """Return the same value for two handles of the same GPU."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except ctypes.ArgumentError:
        return handle


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
