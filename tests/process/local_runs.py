"""Runs for tests: real jobs, agents and torchrun, on this machine or a test cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
from tests.support.forked import RANK_FORKS

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records.documents import Claim, Outcome, read_document
from holdfast.contracts.records.history import AttemptView, RunHistory, load_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.nodes.heartbeats import NodeBeat, newest_step, read_heartbeats
from holdfast.workers.runs import attempts, run_folders
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.schedulers import executor_for

PROGRAM: Final = Path(__file__).with_name("agent_program.py")
T = TypeVar("T")
WAIT_S: Final = 180.0
POLL_S: Final = 0.1


class LocalRun:
    """One run under `root`, with accessors for tests."""

    def __init__(
        self,
        root: Path,
        *,
        gpus: int = 2,
        grace_s: float = 15.0,
        resources: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        supervision: dict[str, Any] | None = None,
        program: Path = PROGRAM,
        launch: dict[str, Any] | None = None,
        elastic: dict[str, Any] | None = None,
        health: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        on: Sequence[dict[str, Any]] = (),
        spec: RunSpec | None = None,
        forks: bool = True,
        **settings: Any,
    ) -> None:
        """`own` is the spec's table `program`. Without torchrun, this Python runs the program.

        With `spec`, the other settings do not count. With `forks`, torchrun forks its ranks, which
        saves each of them the import of torch.
        """
        defaults = {"steps": 40, "sleep_s": 0.02}
        search = (str(RANK_FORKS), os.environ.get("PYTHONPATH"))
        path = {"PYTHONPATH": os.pathsep.join(filter(None, search))} if forks else {}
        python = (sys.executable,) if (own or {}).get("launcher") == "none" else ()
        self.spec = spec or RunSpec(
            name="tried",
            command=(*python, program.name, json.dumps({**defaults, **settings})),
            launch={"working_directory": str(program.parent), **(launch or {})},
            environment={**path, **(environment or {})},
            resources=resources or {"gpus_per_node": gpus},
            elastic=elastic or {"min_gpus": 1},
            supervision={
                "grace_s": grace_s,
                "heartbeat_s": 0.2,
                "backoff_s": 0,
                # Warm standbys cost seconds of two processors, and few tests need them.
                "standby_after_s": "off",
                **(supervision or {}),
            },
            health=health or {},
            config=config or {},
            program=own or {},
            on=on,
            checkpoint=checkpoint or ({} if own else {"interval": 1000}),
        )
        self.paths, _ = run_folders.attach_or_create(self.spec, root, created_by="tests")

    def submit(self, gpus: int | None = None, exclude: Sequence[str] = ()) -> AttemptPaths:
        """Submit the next attempt."""
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return attempts.submit_attempt(
                self.paths,
                self.spec,
                run_folders.read_record(self.paths),
                gpus=gpus or self.spec.gpus,
                reason="a test",
                exclude=exclude,
                journal=journal,
            )

    def history(self) -> RunHistory:
        return reconcile(self.paths)

    def wait_for_end(self, wait_s: float = WAIT_S) -> AttemptView:
        """Wait until the last attempt has ended, and return it."""
        return wait_until(lambda: _ended(self.history()), "the attempt's end", wait_s)

    def beats(self, attempt: AttemptPaths) -> list[NodeBeat]:
        return read_heartbeats(attempt)

    def wait_for_step(self, attempt: AttemptPaths, step: int) -> int:
        """Wait until training has reached `step`; returns the current step."""
        return wait_until(lambda: _reached(attempt, step), f"step {step}")

    def claim(self, attempt: AttemptPaths) -> Claim:
        return wait_until(lambda: read_document(Claim, attempt.claim), "the claim")

    def outcome(self, attempt: AttemptPaths) -> Outcome:
        return wait_until(lambda: read_document(Outcome, attempt.outcome), "the outcome")

    def events(self, kind: EventKind) -> list[Event]:
        self.history()
        return [event for event in load_events(self.paths) if event.kind is kind]

    def end_all(self) -> None:
        """End all processes that a failed test left running."""
        for view in self.history().attempts:
            if view.request is not None and not view.state.is_terminal:
                executor = executor_for(view.request.executor)
                found = executor.find(view.request)
                if found is not None:
                    executor.cancel(view.request, found)


def processes_of(paths: RunPaths) -> list[psutil.Process]:
    """Every live process with the run's folder in its command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if alive and any(str(paths.directory) in word for word in words):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def wait_until(look: Callable[[], T | None], what: str, wait_s: float = WAIT_S) -> T:
    """Poll `look` until it returns a true value, and return that."""
    give_up = time.monotonic() + wait_s
    while time.monotonic() < give_up:
        found = look()
        if found:
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"{what} did not come within {wait_s:.0f} s")


def send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


def _ended(history: RunHistory) -> AttemptView | None:
    last = history.last_attempt
    return last if last is not None and last.state.is_terminal else None


def _reached(attempt: AttemptPaths, step: int) -> int | None:
    newest = newest_step(read_heartbeats(attempt))
    return newest if newest is not None and newest >= step else None
