"""Captures crashes of real torchrun launches under a real node runtime."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
from tests.endings.endings import Crash
from tests.endings.records import TAIL_CHARACTERS

from holdfast.contracts.records.documents import write_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.node import CrashReport
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.runs import attempts, run_folders
from holdfast.workers.runs.request import build_request

PROGRAMS: Final = Path(__file__).with_name("programs")
END_WAIT_S: Final = 240.0
NEIGHBOUR_WAIT_S: Final = 0.5
POLL_S: Final = 0.05
GUARD: Final = "holdfast.workers.agent.guard"
_MEMORY_GROUPS: Final = Path("/sys/fs/cgroup/memory")
_GROUPS: Final = Path("/sys/fs/cgroup")


def capture_crash(crash: Crash) -> tuple[dict[str, Any], dict[str, str]]:
    """(the inputs of `classify_crash`, the parts of them that are private to this machine)."""
    with (
        tempfile.TemporaryDirectory(prefix="ending-") as scratch,
        _memory_limit(crash.memory_bytes),
        _small_file_system(Path(scratch), crash.full_bytes) as full,
    ):
        environment = {"ENDING_FULL_DIRECTORY": str(full)} if full else {}
        crash_report = _run(crash, Path(scratch), environment)
    inputs = crash_report.to_json()
    for failure in inputs["failures"]:
        failure["stderr_tail"] = failure["stderr_tail"][-TAIL_CHARACTERS:]
    return inputs, {scratch: "/scratch"}


def _run(crash: Crash, root: Path, environment: dict[str, str]) -> CrashReport:
    spec = RunSpec(
        name="ending",
        command=crash.argv,
        environment=environment,
        launch={"working_directory": str(PROGRAMS)},
        resources={"gpus_per_node": 2},
    )
    paths, _ = run_folders.attach_or_create(spec, root, created_by="capture")
    attempt = attempts.reserve(paths, 1)
    assert attempt is not None
    record = run_folders.read_record(paths)
    request = build_request(record, spec, attempt=1, gpus=2, reason="capture")
    write_document(attempt.request, request)
    runtime = NodeRuntime(load_context(attempt.request))
    try:
        runtime.start(1, "127.0.0.1", _free_port())
        if crash.ends_torchrun:
            _kill_torchrun()
        _wait_for_end(runtime)
        time.sleep(NEIGHBOUR_WAIT_S)
        runtime.kill()
        return runtime.crash_report()
    finally:
        runtime.close()


def _wait_for_end(runtime: NodeRuntime) -> None:
    give_up = time.monotonic() + END_WAIT_S
    while runtime.report().exit_code is None:
        if time.monotonic() > give_up:
            raise TimeoutError(f"torchrun had not ended after {END_WAIT_S:.0f} s")
        time.sleep(POLL_S)


def _kill_torchrun() -> None:
    """SIGKILL torchrun once its ranks run."""
    give_up = time.monotonic() + END_WAIT_S
    while time.monotonic() < give_up:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_torchrun = "torch.distributed.run" in words and GUARD not in words
                if is_torchrun and process.children():
                    process.send_signal(signal.SIGKILL)
                    return
        time.sleep(POLL_S)
    raise TimeoutError("torchrun started no rank")


@contextlib.contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """Limit this process and its children to `size` bytes of memory; needs root."""
    if not size:
        yield
        return
    is_first_version = _MEMORY_GROUPS.exists()
    parent = _MEMORY_GROUPS if is_first_version else _GROUPS
    group = parent / f"holdfast-ending-{os.getpid()}"
    limit = "memory.limit_in_bytes" if is_first_version else "memory.max"
    before = _own_group(parent, is_first_version)
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        _remove_group(group)


def _own_group(parent: Path, is_first_version: bool) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if is_first_version else not controllers:
            return parent / path.lstrip("/")
    return parent


def _remove_group(group: Path) -> None:
    give_up = time.monotonic() + 10.0
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(POLL_S)


@contextlib.contextmanager
def _small_file_system(scratch: Path, size: int) -> Iterator[Path | None]:
    """A file system of `size` bytes in memory; needs root."""
    if not size:
        yield None
        return
    folder = scratch / "full"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, timeout=30
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
