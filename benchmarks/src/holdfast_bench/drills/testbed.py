"""A temporary testbed for drills: a root, an index, a small training run and its supervisor.

All files are in one temporary folder. The runs' root may be a small file system of its own, so
that it can be filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.contracts import environment
from holdfast.contracts.disk.filesystems import filesystem_of
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.records.attempt import Request, Submission, read_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import NumericsAction
from holdfast.contracts.states import Cause
from holdfast.flows import detached
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers import executor_for
from holdfast_bench.drills import replica_memory
from holdfast_bench.drills.cloud import CLOUD, CloudService
from holdfast_bench.drills.prefect_server import PrefectServer
from holdfast_bench.drills.recorded_run import RecordedRun
from holdfast_bench.drills.steps import Records, Reference, reference_of

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
