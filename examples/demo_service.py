"""A real Prefect server with a process worker, both as context managers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SERVER_S_MAX: Final = 400.0
SERVICE_UNAVAILABLE: Final = 503
COMMAND_S_MAX: Final = 300.0
WORKER_S_MAX: Final = 300.0
# The worker waits some seconds for its flows to end, and the server closes its database.
END_S_MAX: Final = 40.0
POOL: Final = "holdfast"
# Made by the set-up. With a copy of it, the server starts several times faster.
DATABASE: Final = Path(__file__).parents[1] / ".setup" / "prefect" / "prefect.db"
# No telemetry and no prompts, and the worker polls often.
QUIET: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_LOGGING_LEVEL": "INFO",
}


class PrefectService:
    """The server, and programs that run with its `environment`.

    A program that must end gets SIGTERM, and is killed after `end_s` seconds.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], end_s: float = END_S_MAX
    ) -> None:
        self.folder = folder
        self.end_s = end_s
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **environment,
            **QUIET,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": self.api,
        }

    def command(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, such as `prefect`, and return its output."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    @contextlib.contextmanager
    def background(self, name: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program of this environment in its own session until the block ends."""
        program = [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                program,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end_session(process, self.end_s)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Run the server. The block starts once the server answers."""
        own = self.folder / "prefect" / DATABASE.name
        if DATABASE.exists() and not own.exists():
            own.parent.mkdir(exist_ok=True)
            shutil.copyfile(DATABASE, own)
        start = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        with self.background("server", start) as process:
            self._wait_for_answer(process)
            yield

    def create_pool(self) -> None:
        """Create the work pool, so that a worker and a deployment can use it at the same time."""
        self._post("work_pools/", {"name": POOL, "type": "process"})

    def find_failure(self) -> str | None:
        """Return the message of a flow run that failed, or None."""
        state = {"type": {"any_": ["FAILED", "CRASHED"]}}
        failed = self._post("flow_runs/filter", {"flow_runs": {"state": state}})
        return str(failed[0]["state"]["message"]) if failed else None

    @contextlib.contextmanager
    def working(
        self, meanwhile: Callable[[], object] = lambda: None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process worker that polls the pool. The block starts once it has started.

        `meanwhile` is called while the worker starts.
        """
        start = ("prefect", "worker", "start", "--pool", POOL, "--type", "process")
        log = self.folder / "worker.log"
        seen = log.stat().st_size if log.exists() else 0
        with self.background("worker", start) as process:
            meanwhile()
            ends_at = time.monotonic() + WORKER_S_MAX
            while b"started!" not in log.read_bytes()[seen:]:
                if process.poll() is not None or time.monotonic() > ends_at:
                    raise RuntimeError(f"the worker did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield process

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON answer. Raises `OSError` if the server refuses or does not answer."""
        headers = {"Content-Type": "application/json"}
        content = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}/{path}", content, headers)
        ends_at = time.monotonic() + SERVER_S_MAX
        while True:
            try:
                with urllib.request.urlopen(request, timeout=COMMAND_S_MAX) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                # While its database is busy, the server answers so. Prefect's client retries too.
                if error.code != SERVICE_UNAVAILABLE or time.monotonic() > ends_at:
                    raise
            time.sleep(0.3)

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> None:
        ends_at = time.monotonic() + SERVER_S_MAX
        while time.monotonic() < ends_at:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.api}/health", timeout=2)
                return
            if process.poll() is not None:
                break
            time.sleep(0.3)
        log = (self.folder / "server.log").read_text()[-2000:]
        raise RuntimeError(f"the Prefect server did not answer at {self.api}:\n{log}")


def free_port() -> int:
    """Return a loopback port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_session(process: subprocess.Popen[bytes], end_s: float) -> None:
    """Send SIGTERM to the process, and after `end_s` seconds kill the rest of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(end_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S_MAX)
