"""One launch of torchrun on this node: its command, environment, logs and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts import environment
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.spec.secrets import hide, longest_first, references_in, resolve_environment
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.agent.launch.command import (
    Handles,
    build_command,
    build_environment,
    log_directory,
    meeting_environment,
)
from holdfast.workers.agent.launch.loaded_torchrun import GUARD, TORCHRUN, LoadedTorchrun
from holdfast.workers.agent.watch import flight_recorder, kernel_view
from holdfast.workers.decisions.causes import RankFailure
from holdfast.workers.decisions.evidence import (
    ended_peers,
    last_traceback,
    read_error_file,
    read_report,
)
from holdfast.workers.nodes import processes, visible_gpus

# A log that a process writes to this node's memory, copied to storage by a thread.
#
# The agent reads torchrun's log many times a second to find failed ranks. On shared storage each
# read would be a request to its server, and a server that hangs would stop the agent.

COPY_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 20
LAST_COPY_S: Final = 2.0


class LocalLog:
    """Give `handle` to a process as its output, and call `close` when the process has ended."""

    def __init__(self, path: Path, handle: int | None = None) -> None:
        """`path` receives a copy, appended about once a second. `handle` is the log, if it exists.

        The log's descriptor is closed with this object.
        """
        if handle is None:
            handle = os.memfd_create(path.name, os.MFD_CLOEXEC)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        self._path, self._copied = path, 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_on, name="log-copy", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> int:
        return self._file.fileno()

    def tail(self, size: int) -> str:
        """Return the last `size` bytes as text. Invalid bytes are replaced."""
        start = max(0, os.fstat(self.handle).st_size - size)
        return os.pread(self.handle, size, start).decode(errors="replace")

    def close(self) -> None:
        """Copy what is left, and wait for that at most `LAST_COPY_S` seconds."""
        self._has_ended.set()
        self._thread.join(LAST_COPY_S)

    def _copy_on(self) -> None:
        is_last = False
        with contextlib.suppress(OSError):
            self._path.touch()
        while not is_last:
            is_last = self._has_ended.wait(COPY_S)
            # Storage that is full or away must not stop later copies.
            with contextlib.suppress(OSError):
                self._copy()

    def _copy(self) -> None:
        while content := os.pread(self.handle, CHUNK_BYTES, self._copied):
            with open(self._path, "ab") as log:
                log.write(content)
            self._copied += len(content)


KILL_WAIT_S: Final = 30.0
TAIL_BYTES: Final = 64 * 1024
REPORT_BYTES: Final = 1024 * 1024
LOG_TAIL_BYTES: Final = 4096
TRACEBACK_CHARACTERS_MAX: Final = 20_000
# A process that fails on its own writes one of these before it ends.
_ERROR_TEXT = re.compile(r"Traceback|[Ee]rror|[Ee]xception|terminate called|[Aa]bort|watchdog")
# A rank that fails because another rank failed reports its error within this time.
PEER_ERROR_S: Final = 2.0


class Torchrun:
    """torchrun on this node, under a guard that ends everything below it."""

    def __init__(
        self,
        context: AgentContext,
        launch: int,
        *,
        address: str,
        port: int,
        handles: Handles,
        standby_pipe: str = "",
        place: str = "",
    ) -> None:
        """Start torchrun. With a `standby_pipe` each rank loads its libraries and waits for a byte.

        With the path `place`, torchrun runs without those of other nodes, and each rank reads its
        place there before it starts the program. Raises `SecretError` before anything is started if
        a secret reference has no value here, and `InterfaceError` if this node lacks the spec's
        network interface.
        """
        given = resolve_environment(context.request.environment, context.run)
        references = references_in(context.request.environment)
        if interface := context.request.launch.network_interface:
            addresses_of(interface, context.host)
        self._secrets = longest_first(given[name] for name in references)
        self._context = context
        self._launch = launch
        self._program = context.request.program
        has_torchrun = self._program.launcher == "torchrun"
        self._ranks = context.request.ranks_per_node if has_torchrun else 1
        self._logs = log_directory(context, launch)
        self._linked: set[int] = set()
        self._failed_at: float | None = None
        self._is_silent_death = False
        make_directory(self._logs)
        # A lost node may have left those of its warm standby here.
        self._former = set(self._logs.iterdir())
        is_alone = bool(place)
        command = build_command(
            context.request.model_copy(update={"nodes": 1}) if is_alone else context.request,
            node=0 if is_alone else context.node,
            launch=launch,
            address=address,
            port=port,
            logs=self._logs,
        )
        inherited = {**os.environ, **given}
        recorder = (
            flight_recorder.recorder_environment(self._logs, inherited)
            if visible_gpus.CONTROL.exists()
            else {}
        )
        inherited = {**recorder, **os.environ}
        variables = build_environment(context, launch, handles, inherited, given)
        if not has_torchrun:
            variables |= meeting_environment(context, address, port)
        if standby_pipe:
            variables[environment.STANDBY_PIPE] = standby_pipe
        if place:
            variables[environment.PLACE] = place
        self._start(command, variables, None if standby_pipe else context.torchrun)

    def _start(
        self, command: list[str], variables: Mapping[str, str], loaded: LoadedTorchrun | None
    ) -> None:
        """Start the guard with torchrun below it, or let the torchrun that is loaded begin."""
        log = self._logs / "torchrun.log"
        if loaded is not None and loaded.is_ready:
            self._log = LocalLog(log, loaded.log)
            # The words before are Python's, which runs already.
            words = command[command.index(TORCHRUN) + 1 :]
            self._process = loaded.start(words, variables)
            return
        self._log = LocalLog(log)
        self._process = subprocess.Popen(
            [sys.executable, "-m", GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=self._log.handle,
            stderr=self._log.handle,
            cwd=self._context.request.working_directory,
            env=variables,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The guard's process id. torchrun and its ranks are below it."""
        return self._process.pid

    def move(self, context: AgentContext) -> None:
        """Take the place of `context` in the launch. The logs stay, and get links there."""
        self._context = context
        make_directory(log_directory(context, self._launch))

    @property
    def is_whole(self) -> bool:
        """True while torchrun runs and has not started to end its ranks."""
        return self._process.poll() is None and not self._peers_ended()

    def poll(self, *, peer_error_s: float = PEER_ERROR_S) -> int | None:
        """Return torchrun's exit code, or None while it runs; also link its logs into place.

        The other ranks of this node are killed `peer_error_s` seconds after a rank has failed.
        """
        self._link_logs()
        code = self._process.poll()
        if code is None:
            self._end_peers(peer_error_s)
        return code

    def _end_peers(self, after_s: float) -> None:
        """Kill the ranks that torchrun is ending, so that it writes its report."""
        ending = self._peers_ended()
        if not ending:
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._is_silent_death = self._has_died_silently()
        is_certain = self._is_silent_death and math.isfinite(after_s)
        if not is_certain and time.monotonic() - self._failed_at < after_s:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in processes.descendants(psutil.Process(self._process.pid)):
                if process.pid in ending:
                    process.kill()

    def _has_died_silently(self) -> bool:
        """Return True if a rank ended without an error record.

        It counts as killed, and its peers cannot report more than that.
        """
        dead = set(range(self._ranks)) - set(self.rank_pids())
        folders = [self._rank_folder(local) for local in dead]
        return any(
            not (folder / "error.json").exists()
            and not _ERROR_TEXT.search(read_tail(folder / "stderr.log", LOG_TAIL_BYTES))
            for folder in folders
            if folder is not None
        )

    def _peers_ended(self) -> set[int]:
        """Return the ids of the ranks that torchrun ends because another rank failed."""
        return ended_peers(self._log.tail(REPORT_BYTES))

    def kill(self) -> None:
        """Kill every process below, within `KILL_WAIT_S` seconds. The guard does it."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            guard = psutil.Process(self._process.pid)
            processes.end_processes([*processes.descendants(guard), guard], term_wait_s=0)
        self._log.close()

    def rank_pids(self) -> dict[int, int]:
        """Return process ids by local rank, including ranks that have not registered."""
        found: dict[int, int] = {}
        with contextlib.suppress(psutil.Error):
            if self._program.launcher == "none":
                # The guard also adopts orphans, which are younger.
                started = psutil.Process(self.pid).children()
                return {0: min(started, key=lambda one: one.create_time()).pid} if started else {}
            for launcher in psutil.Process(self._process.pid).children():
                for process in launcher.children():
                    local = process.environ().get("LOCAL_RANK", "")
                    if local.isdecimal():
                        found[int(local)] = process.pid
        return found

    def signal_program(self, signalled: set[int]) -> None:
        """Send each rank its signal once; `signalled` has those that got it, and is extended."""
        if self._program.signal == "none" or len(signalled) == self._ranks:
            return
        number = signal.Signals[self._program.signal]
        for pid in set(self.rank_pids().values()) - signalled:
            if kernel_view.ignores(pid, number):
                # It has not started yet, or does not want the signal. Look again at the next poll.
                continue
            signalled.add(pid)
            with contextlib.suppress(psutil.Error):
                main = psutil.Process(pid)
                below = processes.descendants(main) if self._program.signal_to == "all" else []
                for process in (main, *below):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)

    def failures(self) -> list[RankFailure]:
        """Return the failures of this node's ranks, from torchrun's report, error files and stderr.

        Ranks that were ended because another rank failed are not included.
        """
        ended = self._peers_ended()
        report = self._log.tail(REPORT_BYTES)
        found: dict[int, RankFailure] = {}
        first = self._context.node * self._context.request.ranks_per_node
        for one in read_report(report):
            local = one.local
            failure = self._failure(first + local, local, one.code, one.pid)
            if one.code < 0 and failure.pid in ended:
                if not failure.traceback:
                    continue
                # It failed on its own too, but exited more slowly than its peers.
                failure = dataclasses.replace(failure, exit_code=1)
            found[local] = failure
        if not found:
            for local in range(self._ranks):
                failure = self._failure(first + local, local, self._own_code(), 0)
                if failure.traceback or self._program.launcher == "none":
                    found[local] = failure
        return list(found.values())

    def _own_code(self) -> int:
        """Return the exit code of a command that runs without torchrun; otherwise 1.

        The guard reports an end by a signal as shells do, which becomes a negative number here.
        """
        code = self._process.poll() if self._program.launcher == "none" else None
        return 1 if code is None else code if code <= 128 else 128 - code

    def unwritten_error(self) -> str:
        """Return that the storage had no room for a rank's error, or ''.

        torchrun fails itself when it then reads the empty file, and names no rank.
        """
        folders = (self._rank_folder(local) for local in range(self._ranks))
        return next(filter(None, (unwritten_in(folder) for folder in folders if folder)), "")

    def log_tail(self) -> str:
        """Return the end of torchrun's own log."""
        return hide(self._log.tail(LOG_TAIL_BYTES), self._secrets)

    def _failure(self, rank: int, local: int, code: int, pid: int) -> RankFailure:
        folder = self._rank_folder(local)
        traceback, timestamp = ("", 0.0) if folder is None else _error_file(folder / "error.json")
        stderr = read_tail(folder / "stderr.log", TAIL_BYTES) if folder else ""
        # Failures are journaled, and a program's output may contain a secret.
        stderr = hide(stderr, self._secrets)
        traceback = hide(traceback, self._secrets) or last_traceback(stderr)
        return RankFailure(
            rank=rank,
            exit_code=code,
            timestamp=timestamp,
            traceback=traceback[-TRACEBACK_CHARACTERS_MAX:],
            pid=pid,
            stderr_tail=stderr[-TRACEBACK_CHARACTERS_MAX // 5 :],
            host=self._context.host,
        )

    def _rank_folder(self, local: int) -> Path | None:
        """Return torchrun's own folder for a local rank: `<id>_<random>/attempt_0/<local>`."""
        folders = sorted(self._logs.glob(f"*/attempt_0/{local}"))
        return next((one for one in folders if one.parents[1] not in self._former), None)

    def _link_logs(self) -> None:
        """Link each rank's output under the name that `paths.rank_log` defines."""
        if len(self._linked) == self._ranks:
            return
        first = self._context.node * self._context.request.ranks_per_node
        for local in range(self._ranks):
            folder = self._rank_folder(local)
            if local in self._linked or folder is None:
                continue
            for stream in ("stdout", "stderr"):
                name = self._context.attempt.rank_log(
                    self._context.node, self._launch, first + local, stream
                )
                name.unlink(missing_ok=True)
                name.symlink_to(os.path.relpath(folder / f"{stream}.log", name.parent))
            self._linked.add(local)


def read_tail(path: Path, size_max: int) -> str:
    """Return the last `size_max` bytes of a file as text, or '' if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size_max))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def unwritten_in(folder: Path) -> str:
    """Return that a rank could not write its error into its `folder`, which is full, or ''."""
    path = folder / "error.json"
    with contextlib.suppress(OSError):
        facts = os.statvfs(folder)
        if path.stat().st_size == 0 and not (facts.f_bavail and facts.f_favail):
            return f"{os.strerror(errno.ENOSPC)}: a rank could not write its error to {path}"
    return ""


def _error_file(path: Path) -> tuple[str, float]:
    """Return the traceback and the time (Unix seconds) in torchrun's error file, or ('', 0)."""
    try:
        return read_error_file(path.read_bytes())
    except OSError:
        return "", 0.0
