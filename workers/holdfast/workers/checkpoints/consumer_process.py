"""`python -m holdfast.workers.checkpoints.consumer_process DIRECTORY/order.json`: run a consumer.

It runs on the supervisor's machine or in a separate job, and outlives the supervisor. It claims
its start exclusively, so one start never runs twice. While the command works, it keeps a lease on
the checkpoint, limits the command's time and output, and at the end writes the outcome.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Literal

import psutil

from holdfast.contracts import environment
from holdfast.contracts.disk import leases, manifest
from holdfast.contracts.disk.paths import ConsumerPaths, checkpoint_id
from holdfast.contracts.errors import HoldfastError, NotFoundError
from holdfast.contracts.plain_text import exact, plain_line
from holdfast.contracts.records.consumers import ConsumerOrder, ConsumerOutcome
from holdfast.contracts.records.documents import Claim, create_document, read_document
from holdfast.contracts.records.history import load_identity
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.secrets import resolve_environment
from holdfast.workers.checkpoints.exports import SUFFIXES, ExportFormat
from holdfast.workers.checkpoints.trainer_call import NEUTRAL_FOLDER, ask_trainer, interpreter_of
from holdfast.workers.nodes import processes, setup_lines

# The rest of the output is read and dropped.
OUTPUT_BYTES_MAX: Final = 16 * 1024 * 1024
CHUNK: Final = 64 * 1024
LOOK_S: Final = 0.2
TERM_WAIT_S: Final = 10.0
# The supervisor's machine may train, too.
NICE: Final = 10
# Waits for a flow run. Only `flows` imports Prefect.
FLOW_RUN: Final = "holdfast.flows.consumer_flow_run"
REASON_CHARACTERS: Final = 500
# Found here, because the child after a fork may not load libraries.
_PRCTL: Final = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG: Final = 1
# Set by people, not by an agent.
_KEPT: Final = frozenset(
    {"HOLDFAST_HOME", "HOLDFAST_DATABASE_URL", environment.S3_ENDPOINT, environment.PAGE_URL}
)


class _StopSignal:
    """The first signal that asks this process to end. The handler only sets a flag."""

    def __init__(self) -> None:
        self.name = ""

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)
        # Slurm's warning before the time limit, which this process enforces itself.
        signal.signal(signal.SIGUSR2, lambda *_: None)

    def _take(self, number: int, _: object) -> None:
        self.name = self.name or signal.Signals(number).name


@dataclass(frozen=True)
class _Work:
    """One start: its files, what to run, and the run's spec."""

    paths: ConsumerPaths
    order: ConsumerOrder
    spec: RunSpec
    stop: _StopSignal

    @property
    def checkpoint(self) -> Path:
        return self.paths.run.checkpoint(self.order.checkpoint)


def run(path: Path) -> tuple[bool, str]:
    """Run the consumer whose `order.json` is at `path`, unless it was claimed.

    Return False if it did not succeed, and how it ended as text.
    """
    paths = ConsumerPaths(path.parent)
    order = read_document(ConsumerOrder, paths.order)
    if order is None:
        raise NotFoundError(f"{paths.order}: no order here; the supervisor writes it before")
    stop = _StopSignal()
    stop.install()
    if not _claim(paths):
        return True, f"start {paths.number} belongs to another process"
    try:
        outcome = _run(_Work(paths, order, load_identity(paths.run)[1], stop))
    except _StoppedError as error:
        outcome = ConsumerOutcome(ending="stopped", reason=str(error), ended_at=time.time())
    except (HoldfastError, OSError, ValueError) as error:
        outcome = ConsumerOutcome.failed(str(error))
    create_document(paths.outcome, outcome)
    text = f"{outcome.ending}: {outcome.reason}" if outcome.reason else outcome.ending
    return outcome.ending == "done", text


def _claim(paths: ConsumerPaths) -> bool:
    own = processes.name_process(os.getpid())
    assert own is not None
    claim = Claim(
        job_id=os.environ.get("SLURM_JOB_ID") or str(own.pid),
        pid=own.pid,
        process_start_s=own.start_s,
        boot_id=own.boot_id,
        host=socket.gethostname(),
        claimed_at=time.time(),
    )
    return create_document(paths.claim, claim)


def _run(work: _Work) -> ConsumerOutcome:
    with leases.reading(work.checkpoint):
        # After the lease, so that either this process or a deleter sees the other.
        if manifest.read_manifest(work.checkpoint) is None:
            name = work.order.checkpoint
            return ConsumerOutcome.failed(f"{name} was deleted before the consumer started")
        with _given_path(work) as path:
            return _run_command(work, path)


@contextlib.contextmanager
def _given_path(work: _Work) -> Iterator[Path]:
    """Yield the path that the command gets: the checkpoint's, or that of an export."""
    if work.order.export is None:
        yield work.checkpoint
        return
    form = ExportFormat(work.order.export)
    output = work.paths.directory / f"export{SUFFIXES[form]}"
    # The process of a deployment runs in the supervisor's Python, which may lack torch.
    is_ours = work.order.deployment is None
    python = [sys.executable] if is_ours else interpreter_of(work.paths.run, work.spec)
    arguments = [str(work.checkpoint), "--to", form.value, "--output", str(output)]
    try:
        ask_trainer(
            python,
            "export",
            *arguments,
            timeout_s=work.order.timeout_s,
            look=partial(_look, work),
        )
        yield output
    finally:
        # It may be as large as the checkpoint.
        shutil.rmtree(output, ignore_errors=True)
        with contextlib.suppress(OSError):
            output.unlink()


class _StoppedError(HoldfastError):
    """A signal ends the consumer while its checkpoint is exported."""


def _look(work: _Work) -> None:
    if work.stop.name:
        raise _StoppedError(f"{work.stop.name} came while the checkpoint was exported")


def _run_command(work: _Work, path: Path) -> ConsumerOutcome:
    """Run the command to its end, its time limit or a signal."""
    order = work.order
    command, folder = _command_of(work)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(work, path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    assert process.stdout is not None
    copy = threading.Thread(
        target=_copy_output, args=(process.stdout, work.paths.log), name="output", daemon=True
    )
    copy.start()
    give_up = time.monotonic() + order.timeout_s
    why = ""
    while process.poll() is None and not why:
        time.sleep(LOOK_S)
        if work.stop.name:
            why = f"{work.stop.name} came, as when a job is preempted or cancelled"
        elif time.monotonic() >= give_up:
            why = f"killed after {exact(order.timeout_s)} s, its time limit"
    _end_all(process)
    copy.join(TERM_WAIT_S)
    if why:
        ending: Literal["failed", "stopped"] = "stopped" if work.stop.name else "failed"
        return ConsumerOutcome(ending=ending, reason=why, ended_at=time.time())
    found = _outcome_of(process.returncode)
    if order.deployment is None or found.ending == "done":
        return found
    return found.model_copy(update={"reason": _last_line(work.paths.log) or found.reason})


def _die_with_parent() -> None:
    """Have the kernel kill the command if this process is killed. A new start follows."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _command_of(work: _Work) -> tuple[list[str], str]:
    """Return what to run, and in which folder."""
    order = work.order
    if order.deployment is not None:
        # `python -m` searches the current folder first, and the run's may have such a module.
        return [sys.executable, "-m", FLOW_RUN, str(work.paths.order)], NEUTRAL_FOLDER
    setup = setup_lines.after_setup("launch.node_setup", work.spec.launch.node_setup)
    return [*setup, *order.command], order.working_directory


def _last_line(log: Path) -> str:
    """Return the last line of a log as one line of text, or ''."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4 * REASON_CHARACTERS))
            lines = file.read().decode(errors="replace").split("\n")
        return plain_line(next((one for one in reversed(lines) if one.strip()), ""))[
            :REASON_CHARACTERS
        ]
    return ""


def _outcome_of(status: int) -> ConsumerOutcome:
    if status == 0:
        return ConsumerOutcome(ending="done", exit_code=0, ended_at=time.time())
    what = f"signal {-status}" if status < 0 else f"exit status {status}"
    return ConsumerOutcome(
        ending="failed", reason=f"it ended with {what}", exit_code=status, ended_at=time.time()
    )


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the command with everything that it started, and what it left behind."""
    with contextlib.suppress(psutil.Error):
        one = psutil.Process(process.pid)
        processes.end_processes([one, *processes.descendants(one)], term_wait_s=TERM_WAIT_S)
    # Processes of its session that its own end has orphaned.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERM_WAIT_S)


def _copy_output(stream: BinaryIO, path: Path) -> None:
    """Write the start of the output to a file, and drop the rest. The command never waits."""
    left = OUTPUT_BYTES_MAX
    with contextlib.suppress(OSError), path.open("wb") as file:
        while chunk := os.read(stream.fileno(), CHUNK):
            if left <= 0:
                continue
            with contextlib.suppress(OSError):
                file.write(chunk[:left])
                file.flush()
            left -= len(chunk)
            if left <= 0:
                file.write(b"\n[the rest of the output was dropped]\n")


def _environment(work: _Work, path: Path) -> dict[str, str]:
    run, order = work.paths.run, work.order
    own = {
        environment.ROOT: str(run.directory.parent),
        environment.RUN: run.name,
        environment.CONSUMER: order.consumer,
        environment.CHECKPOINT: checkpoint_id(run.name, order.checkpoint),
        environment.CHECKPOINT_PATH: str(path),
        environment.CHECKPOINT_STEP: str(order.step),
        environment.METRICS_FILE: str(work.paths.metrics_file),
    }
    # A variable of an agent would make the command believe that it trains.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "HOLDFAST_")) or name in _KEPT
    }
    if order.deployment is not None:
        # The variables of the run are for its program, and its PYTHONPATH too.
        return {**kept, **own}
    return {**kept, **resolve_environment(work.spec.environment, run), **own}


def main(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    is_done, text = run(path)
    print(text, flush=True)
    # Slurm's records of the job then say so, too.
    sys.exit(0 if is_done else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
