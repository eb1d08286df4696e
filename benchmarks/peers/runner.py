"""Runs one peer's job under the faults: fires each at its step and waits for the recovery."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .faults import Cost, Fault, Line, cost_of, ettr_of, read_lines
from .launchers import Launcher, Unfinished

POLL_S: Final = 0.02
# The longest time from one step to the next, including the first start.
STEP_S_MAX: Final = 120.0
# The longest wait after a manual restart. Then the peer has failed.
HAND_S_MAX: Final = 90.0


@dataclass
class Outcome:
    """The result of a peer's job. `problem` is the reason why it did not finish. `load` is the
    machine's load average over its last minute."""

    peer: str
    where: str
    costs: list[Cost] = field(default_factory=list)
    start_s: float | None = None
    ettr: float | None = None
    problem: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    load: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for `--json`."""
        return {**vars(self), "costs": [vars(cost) for cost in self.costs]}


def run_job(launcher: Launcher, faults: tuple[Fault, ...]) -> Outcome:
    """Start the job, apply the faults, wait for its last step, and end all its processes."""
    outcome = Outcome(launcher.peer, launcher.where)
    began_at = time.time()
    try:
        launcher.start()
        outcome.start_s = wait_for_step(launcher, 0, 1, STEP_S_MAX).time - began_at
        for fault in faults:
            outcome.costs.append(apply_fault(launcher, fault))
        wait_for_step(launcher, 0, launcher.job.steps, launcher.job.steps * STEP_S_MAX)
        outcome.ettr = ettr_of(launcher.job, began_at, lines_of(launcher.folder, 0))
    except Unfinished as problem:
        outcome.problem = str(problem)
    finally:
        launcher.end()
    return outcome


def apply_fault(launcher: Launcher, fault: Fault) -> Cost:
    """Wait for the fault's step, apply the fault, and wait for the first new step of the rank.

    If no process is left that could restart the job, it is restarted here. Raises `Unfinished`.
    """
    pid = wait_for_step(launcher, fault.rank, fault.step, launcher.job.steps * STEP_S_MAX).pid
    at = time.time()
    if fault.kind == "kill-rank":
        os.kill(pid, signal.SIGKILL)
    else:
        launcher.terminate_job()
    hand = ""
    ends_at = time.monotonic() + launcher.comeback_s_max
    while True:
        lines = lines_of(launcher.folder, fault.rank)
        if any(line.pid != pid and line.time > at for line in lines):
            return cost_of(fault, at, pid, lines, hand)
        is_late = time.monotonic() > ends_at
        if is_late and hand:
            raise Unfinished(
                f"no step after {fault.kind} at step {fault.step}, not even after a manual restart"
            )
        if is_late or (not hand and launcher.has_ended()):
            silent = f"it was silent for {launcher.comeback_s_max:.0f} s"
            hand = silent if is_late else "it had ended"
            launcher.end()
            launcher.start()
            ends_at = time.monotonic() + HAND_S_MAX
        time.sleep(POLL_S)


def wait_for_step(launcher: Launcher, rank: int, step: int, wait_s: float) -> Line:
    """Wait until the rank has reached `step` and return its newest line. Raises `Unfinished`.

    `wait_s` limits the whole wait, `STEP_S_MAX` the time without a step.
    """
    began = time.monotonic()
    seen, seen_at = -1, began
    while True:
        lines = lines_of(launcher.folder, rank)
        newest = lines[-1].step if lines else 0
        if lines and newest >= step:
            return lines[-1]
        now = time.monotonic()
        seen, seen_at = newest, (seen_at if newest == seen else now)
        has_ended = launcher.has_ended()
        if has_ended or now - seen_at > STEP_S_MAX or now - began > wait_s:
            state = "the job ended" if has_ended else "the job was silent"
            raise Unfinished(f"step {step} was not reached: {state} at step {newest}")
        time.sleep(POLL_S)


def lines_of(folder: Path, rank: int) -> list[Line]:
    """Return what the rank has recorded so far."""
    path = folder / "records" / f"rank{rank}.jsonl"
    return read_lines(path.read_text()) if path.exists() else []
