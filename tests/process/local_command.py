"""Runs the `holdfast` command with a temporary home, and ends everything that it started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from unittest import mock

import psutil
from tests.support.flow_runs import SUPERVISION

from holdfast.cli.main import main
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import list_runs
from holdfast.contracts.records.documents import Request, Submission, read_document
from holdfast.contracts.records.history import load_events
from holdfast.workers.schedulers import executor_for

PROGRAM: Final = Path(__file__).with_name("agent_program.py")
CALL_S: Final = 300.0
# A new process for each of these would take a second. They only read, and unit tests call them so.
IN_THIS_PROCESS: Final = frozenset({"show", "checkpoints", "verify", "simulate", "logs", "lineage"})


class Local:
    """The command with its own home and Prefect home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "home" / "runs"
        self.flows: list[int] = []
        foreign = ("PREFECT_API_URL", "HOLDFAST_DATABASE_URL", "HOLDFAST_ROOT")
        self.environment = {k: v for k, v in os.environ.items() if k not in foreign}
        self.environment |= {
            "HOLDFAST_HOME": str(folder / "home"),
            "PREFECT_HOME": str(folder / "prefect"),
        }

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if arguments[0] in IN_THIS_PROCESS:
            return self._call_here(arguments)
        return subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )

    def _call_here(self, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        written = io.BytesIO(), io.BytesIO()
        said, errors = (io.TextIOWrapper(one, write_through=True) for one in written)
        status: object = None
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            mock.patch.object(sys, "argv", ["holdfast", *arguments]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(errors),
        ):
            try:
                main()
            except SystemExit as ended:
                status = ended.code
        assert isinstance(status, int)
        texts = (one.getvalue().decode() for one in written)
        return subprocess.CompletedProcess(arguments, status, *texts)

    def json(self, *arguments: str) -> Any:
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        if isinstance(told, dict) and told.get("pid"):
            self.flows.append(told["pid"])
        return told

    def write_spec(self, name: str, settings: dict[str, Any], **keys: Any) -> Path:
        """A spec of the small program; `keys` are further spec keys."""
        path = self.folder / f"{name}.yaml"
        spec = {
            "name": name,
            "command": [PROGRAM.name, json.dumps(settings)],
            "launch": {"working_directory": str(PROGRAM.parent)},
            "environment": {"OMP_NUM_THREADS": "1"},
            "checkpoint": {"interval": 10, "keep": {"last": 2}},
            "supervision": SUPERVISION,
            **keys,
        }
        path.write_text(json.dumps(spec))
        return path

    def end_all(self) -> None:
        """End all flows and jobs, also those that a failed test left running."""
        for pid in self.flows:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # The pid may belong to another process by now.
                if str(self.root) in " ".join(process.cmdline()):
                    process.terminate()
        for paths in list_runs(self.root):
            for event in load_events(paths):
                if event.kind is EventKind.SUPERVISED and psutil.pid_exists(event.data["pid"]):
                    os.kill(event.data["pid"], signal.SIGTERM)
            for attempt in paths.list_attempts():
                request = read_document(Request, attempt.request)
                submission = read_document(Submission, attempt.submission)
                if request and submission and not attempt.outcome.exists():
                    executor_for(request.executor).cancel(request, submission)
