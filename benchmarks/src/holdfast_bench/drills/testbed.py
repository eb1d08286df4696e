"""A temporary testbed for drills: a root, an index, a small training run and its supervisor.

All files are in one temporary folder. The runs' root may be a small file system of its own, so
that it can be filled. On request, a testbed has a Prefect server that can be killed and restarted,
and a cloud's metadata service on loopback, which announces preemptions. That one behaves like
Google's: a request may wait until the value changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from holdfast.contracts import environment
from holdfast.contracts.disk.filesystems import filesystem_of
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.records.documents import Request, Submission, read_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import NumericsAction
from holdfast.contracts.states import Cause
from holdfast.flows import detached
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers import executor_for
from holdfast_bench.drills import replica_memory
from holdfast_bench.drills.steps import RecordedRun, Records, Reference, reference_of

PROGRAM: Final = ("-m", "holdfast_bench.drills.program")
RANKS: Final = 2
STEP_S: Final = 0.04
INTERVAL_STEPS: Final = 20
SNAPSHOT_STEPS: Final = 5
KEEP_LAST: Final = 4
PADDING_BYTES: Final = 3 << 20
DISK_MB: Final = 96
ON_NAN: Final[tuple[NumericsAction, ...]] = ("stop", "rollback", "skip")
STEPS_UNBOUNDED: Final = 1_000_000
UNLIMITED: Final = 1_000_000
POLL_S: Final = 0.5
# A step takes 40 ms, so a rank that is silent for this long hangs, even on a busy machine.
SILENCE_S: Final = {"train": 6.0}
REFERENCE_S_MAX: Final = 600.0
END_S: Final = 180.0
CLOUD: Final = "gcp"
QUIET: Final = {"preempted": "FALSE", "maintenance-event": "NONE"}
WAIT_S_MAX: Final = 60.0
FLAVOR: Final = "Metadata-Flavor"
CLOUD_END_S: Final = 10.0
# On a busy machine, a start takes minutes.
START_S_MAX: Final = 420.0
SERVER_POLL_S: Final = 0.2
ANSWER_S: Final = 2.0
SERVER_END_S: Final = 30.0
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
            time.sleep(SERVER_POLL_S)
        self.kill()
        log_end = (self._folder / "server.log").read_text(errors="replace")[-1000:]
        raise ServiceError(f"the Prefect server did not respond at {self.url}:\n{log_end}")

    def kill(self) -> None:
        """Send SIGKILL to all processes of its session."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SERVER_END_S)
        self._process = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: an agent that ends closes its connections."""


class CloudService:
    """Serves from construction until `close`. `preempt` announces a preemption."""

    def __init__(self) -> None:
        self._values = dict(QUIET)
        self._changed = threading.Condition()
        self._is_over = False
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The value for `supervision.notices_url`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def preempt(self) -> None:
        """Announce that the machine will be taken away."""
        self._set("preempted", "TRUE")

    def calm(self) -> None:
        """Withdraw the announcement, for the next machine."""
        self._set("preempted", "FALSE")

    def close(self) -> None:
        """Stop the service and every waiting request."""
        self._is_over = True
        self._set("preempted", "FALSE")
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOUD_END_S)

    def _set(self, entry: str, value: str) -> None:
        with self._changed:
            self._values[entry] = value
            self._changed.notify_all()

    def _wait(self, entry: str, known: str | None, wait_s: float) -> str:
        """Return the value when it differs from `known`, or after `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._values[entry] != known, wait_s)
            return self._values[entry]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                entry = parts.path.rpartition("/")[2]
                if entry not in QUIET or self.headers.get(FLAVOR) != "Google":
                    self.send_error(404)
                    return
                waits = query.get("wait_for_change") == "true"
                wait_s = float(query.get("timeout_sec", WAIT_S_MAX)) if waits else 0.0
                # The value is also its ETag.
                value = service._wait(entry, query.get("last_etag"), min(wait_s, WAIT_S_MAX))
                self.send_response(200)
                for name, text in {FLAVOR: "Google", "ETag": value}.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(value)))
                self.end_headers()
                self.wfile.write(value.encode())

            def log_message(self, *_: Any) -> None:
                """Do not log requests, because they are frequent."""

        return Handler


@dataclass
class Testbed:
    """One of several testbeds.

    `reference` has the uninterrupted run's steps. `on_nan` is the newest run's action after a NaN
    loss, which differs from run to run.
    """

    folder: Path
    root: Path
    # Holdfast's home, which contains the index.
    home: Path
    number: int = 0
    on_nan: NumericsAction = "stop"
    reference: Reference = field(default_factory=dict)
    cloud: CloudService = field(default_factory=CloudService)
    _prefect: PrefectServer | None = None
    _flow: subprocess.Popen[bytes] | None = None
    _runs: list[RunPaths] = field(default_factory=list)
    _jobs: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the processes that are started here."""
        own = {"HOLDFAST_HOME": str(self.home), "HOLDFAST_ROOT": str(self.root)}
        return {**os.environ, **own}

    def train_reference(
        self,
        steps: int,
        windows: Sequence[tuple[int, int]] = (),
        *,
        ranks: int = RANKS,
        directory: Path | None = None,
        interval: int = STEPS_UNBOUNDED,
    ) -> Reference:
        """Train `steps` steps on `ranks` ranks without interruption and without delay.

        Training skips the data of `windows`, pairs of first step and number of steps. It saves into
        `directory` every `interval` steps, and resumes from what is there. Raises `ServiceError` if
        the program fails.
        """
        folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.folder))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--log-dir={folder / 'logs'}", *PROGRAM]
        settings = self.settings(folder / "records", steps=steps, step_s=0.0, windows=[*windows])
        variables = {
            **self.environment,
            "OMP_NUM_THREADS": "1",
            environment.CONFIG: json.dumps(
                {**settings, "directory": str(directory or folder / "run")}
            ),
            environment.CHECKPOINT_INTERVAL: str(interval),
            environment.CHECKPOINT_SNAPSHOTS: "off",
        }
        with open(folder / "output.log", "wb") as log:
            process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        try:
            status = process.wait(REFERENCE_S_MAX)
        except subprocess.TimeoutExpired:
            text = f"the uninterrupted run of {steps} steps took over {REFERENCE_S_MAX:.0f} s"
            raise ServiceError(text) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
        if status != 0:
            output = (folder / "output.log").read_text(errors="replace")[-2000:]
            raise ServiceError(f"the uninterrupted run failed with status {status}:\n{output}")
        return reference_of(folder / "records")

    def begin_run(self) -> RecordedRun:
        """Create a run and start its supervisor. The run before must have ended."""
        number = len(self._runs) + 1
        self.on_nan = ON_NAN[(self.number + number) % len(ON_NAN)]
        name = f"drill-{number:02d}"
        records = self.records_of(name)
        records.mkdir()
        spec = RunSpec.model_validate(
            {
                "name": name,
                "command": PROGRAM,
                "config": self.settings(records, steps=STEPS_UNBOUNDED, step_s=STEP_S),
                "environment": {"OMP_NUM_THREADS": "1"},
                "launch": {"working_directory": str(self.folder)},
                "resources": {"gpus_per_node": RANKS},
                "checkpoint": {
                    "interval": INTERVAL_STEPS,
                    "snapshots": SNAPSHOT_STEPS,
                    "keep": {"last": KEEP_LAST},
                },
                "supervision": {
                    "poll_s": POLL_S,
                    "notices": CLOUD,
                    "notices_url": self.cloud.url,
                    "heartbeat_s": 0.25,
                    "silence_s": SILENCE_S,
                    "backoff_s": 0.0,
                    "numerics": {"on_nan": self.on_nan},
                    "restarts_in_place": UNLIMITED,
                    "attempts_max": UNLIMITED,
                    "budgets": {c.value: UNLIMITED for c in Cause if c is not Cause.OPERATOR},
                },
            }
        )
        paths = create_run(spec, self.root, created_by="drill")
        self._runs.append(paths)
        self.start_flow(paths)
        return RecordedRun(paths=paths, records=Records(records))

    def move_run(self, paths: RunPaths, place: Path) -> None:
        """Move an ended run into the new folder `place`, with its records and processes' logs."""
        place.mkdir(parents=True)
        own = (self._log_of(paths), self.agents_of(paths.name), self.records_of(paths.name))
        for one in (paths.directory, *(path for path in own if path.exists())):
            shutil.move(one, place / one.name)

    def new_job(self) -> str:
        """Return the name of a new job of several nodes, for which no supervisor is started."""
        self._jobs += 1
        return f"nodes-{self._jobs:02d}"

    def records_of(self, name: str) -> Path:
        """Return the folder of the steps of a run."""
        return self.folder / f"records-{name}"

    def agents_of(self, name: str) -> Path:
        """Return the folder of the output of a job's agents."""
        return self.folder / f"agents-{name}"

    def _log_of(self, paths: RunPaths) -> Path:
        return self.folder / f"flow-{paths.name}.log"

    @property
    def prefect(self) -> PrefectServer:
        """The testbed's own Prefect server, which the caller starts."""
        if self._prefect is None:
            self._prefect = PrefectServer(self.folder / "prefect")
        return self._prefect

    def start_flow(self, paths: RunPaths, *, with_prefect: bool = False) -> None:
        """Start a supervisor for a run that has none, without or with Prefect."""
        module = ["holdfast.flows.detached", *([detached.FLOW] if with_prefect else [])]
        more = self.prefect.environment if with_prefect else {}
        with open(self._log_of(paths), "ab") as log:
            self._flow = subprocess.Popen(
                [sys.executable, "-m", *module, str(paths.directory)],
                env={**self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_flow(self) -> None:
        """Wait until the supervisor has ended.

        After `END_S` seconds, kills it and raises `ServiceError`.
        """
        assert self._flow is not None
        try:
            self._flow.wait(END_S)
        except subprocess.TimeoutExpired:
            raise ServiceError(f"the supervisor had not ended within {END_S:.0f} s") from None
        finally:
            self._end_flow()

    def kill_flow(self) -> None:
        """Send SIGKILL to the supervisor, and reap it."""
        self._end_flow()

    def end(self) -> None:
        """Stop everything that still runs."""
        self._end_flow()
        self.cloud.close()
        if self._prefect is not None:
            self._prefect.kill()
        self.end_attempts()

    def end_attempts(self) -> None:
        """Cancel every job of the testbed's runs. Ended jobs do not change."""
        for paths in self._runs:
            for attempt in paths.list_attempts():
                request = read_document(Request, attempt.request)
                submission = read_document(Submission, attempt.submission)
                if request and submission:
                    with contextlib.suppress(HoldfastError):
                        executor_for(request.executor).cancel(request, submission)

    def _end_flow(self) -> None:
        if self._flow is not None and self._flow.poll() is None:
            self._flow.kill()
        if self._flow is not None:
            self._flow.wait(END_S)

    @staticmethod
    def settings(records: Path, **more: Any) -> dict[str, Any]:
        """Return the program's `[config]`."""
        poison = str(Records(records).poison)
        return {
            "records": str(records),
            "poison": poison,
            "padding_bytes": PADDING_BYTES,
            **more,
        }


@contextlib.contextmanager
def throw_away(folder: Path, *, with_small_disk: bool, number: int = 0) -> Iterator[Testbed]:
    """Yield a testbed in `folder`, and stop it after the block. Its files remain."""
    root = folder / "runs"
    root.mkdir()
    with contextlib.ExitStack() as stack:
        home = folder / "home"
        if filesystem_of(folder).is_network:
            # SQLite needs a local disk.
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-home-")))
        if with_small_disk:
            stack.enter_context(small_disk(root))
        testbed = Testbed(folder=folder, root=root, home=home, number=number)
        home.mkdir(exist_ok=True)
        try:
            yield testbed
        finally:
            testbed.end()


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mount a file system of `DISK_MB` megabytes in memory at `place` during the block.

    Raises `ServiceError` if mounting is not allowed.
    """
    options = f"size={DISK_MB}m"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_S)
    if done.returncode != 0:
        raise ServiceError(f"a separate disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, timeout=END_S)


def find_missing(folder: Path) -> dict[str, str]:
    """Return the kinds of fault that cannot be rehearsed under `folder`, with the reasons."""
    missing = {}
    if unwritable := replica_memory.why_not():
        missing["replica-damage"] = unwritable
    if "HOLDFAST_DATABASE_URL" in os.environ:
        missing["database-down"] = (
            "$HOLDFAST_DATABASE_URL is set, so the drill has no database of its own"
        )
    place = folder / "mount-tried"
    place.mkdir()
    try:
        with small_disk(place):
            pass
    except (ServiceError, OSError) as error:
        missing["disk-full"] = str(error)
    finally:
        place.rmdir()
    return missing
