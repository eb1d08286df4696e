"""A real Prefect server for drills, which can be killed and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Final

from holdfast.contracts.errors import ServiceError

# On a busy machine, a start takes minutes.
START_S_MAX: Final = 420.0
POLL_S: Final = 0.2
ANSWER_S: Final = 2.0
END_S: Final = 30.0
# Turn telemetry off.
_QUIET: Final = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


class PrefectServer:
    """One server, which keeps its address over restarts, and its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])

    @property
    def url(self) -> str:
        """The API's address."""
        return f"http://127.0.0.1:{self._port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        return {**_QUIET, "PREFECT_HOME": str(self._folder), "PREFECT_API_URL": self.url}

    def start(self) -> None:
        """Start the server and wait until it responds. Raises `ServiceError` if it does not."""
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "prefect", "server", "start"]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        give_up = time.monotonic() + START_S_MAX
        while time.monotonic() < give_up and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=ANSWER_S).close()
                return
            time.sleep(POLL_S)
        self.kill()
        log_end = (self._folder / "server.log").read_text(errors="replace")[-1000:]
        raise ServiceError(f"the Prefect server did not respond at {self.url}:\n{log_end}")

    def kill(self) -> None:
        """Send SIGKILL to all processes of its session."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)
        self._process = None
