"""The health checks of this node, which run in a thread until they end or are cancelled."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.plain_text import plain_line, plain_output
from holdfast.contracts.redaction import redact_text
from holdfast.contracts.spec.secrets import plain_part
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import interface_environment
from holdfast.workers.nodes.setup_lines import after_setup

READY: Final = "ready"
NVRX: Final = "nvrx"
ALLREDUCE: Final = "allreduce"
# Options may follow these names.
OWN_CHECKS: Final = (READY, NVRX)
# These checks end themselves before their limit, to say what they waited for.
LIMIT_SHARE: Final = 0.8
TAIL_BYTES: Final = 4096
TAIL_LINES: Final = 5
REASON_CHARACTERS_MAX: Final = 300
LOOK_S: Final = 0.1
END_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """The result of one round of checks. `check` is the one that failed, or empty."""

    round: int
    check: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The nodes that run the check `allreduce` together, and which of them this node is.

    `file` is where the first one writes its address.
    """

    file: str
    node: int
    nodes: int


class HealthChecks:
    """Runs checks one after another. Processes of a check end with it, or with this agent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._meeting: Meeting | None = None
        self.finding: HealthFinding | None = None

    def start(
        self, checks: Sequence[str], round_: int, meeting: dict[str, Any] | None = None
    ) -> None:
        """Start a round of checks; `finding` has its result later."""
        self.cancel()
        self._meeting = Meeting(**meeting) if meeting else None
        self.finding = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(checks, round_, self._cancelled), name="health", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """End the check that runs, with all its processes."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(END_S)
            self._thread = None

    def _run(self, checks: Sequence[str], round_: int, cancelled: threading.Event) -> None:
        for check in checks:
            problem = self._problem_with(check, cancelled)
            if cancelled.is_set():
                return
            if problem:
                self.finding = HealthFinding(round=round_, check=check, problem=problem)
                return
        self.finding = HealthFinding(round=round_)

    def _problem_with(self, check: str, cancelled: threading.Event) -> str:
        """Run one check; return why the node is unhealthy, or ''."""
        request = self._context.request
        network = interface_environment(request.launch.network_interface)
        guard = [sys.executable, "-m", "holdfast.workers.agent.guard"]
        setup = after_setup("launch.node_setup", request.launch.node_setup)
        try:
            process = subprocess.Popen(
                [*guard, *setup, *self._command(check)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=request.working_directory,
                env={**os.environ, **network, **plain_part(request.environment)},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"the check could not be started: {error}"
        with process:
            limit_s = request.health.timeout_s
            tail, is_late = _read_until(process, time.monotonic() + limit_s, cancelled)
            assert process.stdin is not None
            process.stdin.close()
            code = process.wait()
        if is_late:
            return _with_tail(f"the check took longer than {limit_s:g} s", tail)
        return _with_tail(f"the check ended with exit status {code}", tail) if code else ""

    def _command(self, check: str) -> list[str]:
        """Return the command of a check. Raises `ValueError` for unbalanced quotes."""
        request, meeting = self._context.request, self._meeting
        gpus = request.gpus_on_node if request.executor == "slurm" else 0
        limit = f"--timeout-s={request.health.timeout_s * LIMIT_SHARE:g}"
        name, *words = shlex.split(check) if check.startswith(OWN_CHECKS) else [check]
        if check == ALLREDUCE and meeting is not None:
            given = [f"--file={meeting.file}", f"--node={meeting.node}", f"--nodes={meeting.nodes}"]
            given += [f"--processes={max(1, gpus)}", f"--ports={request.supervision.ports}", limit]
            return [sys.executable, "-m", "holdfast.trainer.health_allreduce", *given]
        if name == READY:
            shared = f"--shared={self._context.attempt.directory}"
            command = ["holdfast.workers.health", f"--gpus={gpus}", shared, *words]
        elif name == NVRX:
            command = ["holdfast.workers.health_nvrx", limit, *words]
        else:
            return ["bash", "-c", check]
        return [sys.executable, "-m", *command]


def _read_until(
    process: subprocess.Popen[bytes], give_up: float, cancelled: threading.Event
) -> tuple[bytes, bool]:
    """Read the output until the process ends; return its end, and whether it took too long."""
    assert process.stdout is not None
    tail = b""
    # Not select, which does not support descriptors above 1023.
    waiter = select.poll()
    waiter.register(process.stdout, select.POLLIN)
    while not cancelled.is_set():
        if time.monotonic() > give_up:
            return tail, True
        if not waiter.poll(1000 * LOOK_S):
            continue
        # The guard has the pipe too, and ends only when every process below it has ended.
        part = os.read(process.stdout.fileno(), TAIL_BYTES)
        if not part:
            break
        tail = (tail + part)[-TAIL_BYTES:]
    return tail, False


def _with_tail(problem: str, tail: bytes) -> str:
    """Return the problem with the last lines of the output, without secrets and escapes."""
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines() if line.strip()]
    text = plain_line(plain_output(redact_text("\n".join(lines[-TAIL_LINES:]))))
    return f"{problem}: {text[-REASON_CHARACTERS_MAX:]}" if text else problem
