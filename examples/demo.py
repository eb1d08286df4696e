"""`make demo`: preempt a run on four ranks and resume it on two, without losing a step.

The demo starts a Prefect server and a process worker in a temporary folder, and trains a small GPT
on this machine's cores. It preempts the run as Slurm would, with a SIGTERM to the node's agent. The
run stays in `$HOLDFAST_ROOT`, where `holdfast show`, `lineage` and `serve` find it. The exit
status is 0 if every check passes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from demo_service import POOL, PrefectService

from holdfast.cli.shared.output import bytes_text, seconds_text
from holdfast.contracts.disk.paths import RunPaths, default_root, holdfast_home
from holdfast.contracts.records.documents import Claim, Request, Submission, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.states import Cause
from holdfast.flows.supervisor.summary import describe_progress
from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats
from holdfast.workers.schedulers import executor_for

SPEC: Final = Path(__file__).parent / "gpt" / "spec.toml"
RUN_S_MAX: Final = 300.0
FLOW_START_S_MAX: Final = 120.0
POLL_S: Final = 0.25
# The server and the worker have no needed data once the flow has ended, so they end quickly.
FLOW_END_S_MAX: Final = 10.0
SERVICE_END_S: Final = 0.5
RANKS: Final = (4, 2)
STEPS: Final = 150
OVERRIDES: Final = ("supervision.poll_s=1", "supervision.heartbeat_s=0.5")


def main() -> int:
    """Run the scenario. Return 0 if every check passes, else 1."""
    # SIGTERM raises, so that the server and the worker end too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    run = RunPaths(default_root() / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    environment = {
        **os.environ,
        "HOLDFAST_HOME": str(holdfast_home().absolute()),
        "HOLDFAST_ROOT": str(run.directory.parent),
    }
    service = PrefectService(folder, environment, SERVICE_END_S)
    broken: list[str] = []
    try:
        say(f"starting a Prefect server at {service.api}")
        with service.serving():
            service.create_pool()
            with service.working(meanwhile=lambda: deploy(service)):
                try:
                    play(service, run)
                finally:
                    end_jobs(run)
                broken = judge(service, run)
    except (RuntimeError, OSError) as error:
        broken = [str(error)]
    finally:
        print_logs(folder if broken else None)
        shutil.rmtree(folder, ignore_errors=True)
    for line in broken:
        print(f"FAILED: {line}", file=sys.stderr)
    say(f"{'failed' if broken else 'done'} after {seconds_text(time.monotonic() - began)}")
    return 1 if broken else 0


def deploy(service: PrefectService) -> None:
    """Create the deployment, as an operator would once."""
    service.command("holdfast", "deploy", "--pool", POOL)
    say("created the work pool and the deployment train/holdfast")


def play(service: PrefectService, run: RunPaths) -> None:
    """Submit a run, preempt it after a third of its steps, and wait until run and flow end."""
    overrides = [f"name={run.name}", f"config.steps={STEPS}", *OVERRIDES]
    service.command(
        *("prefect", "deployment", "run", "train/holdfast", "--param", f"spec={SPEC}"),
        *("--param", f"overrides={json.dumps(overrides)}"),
        *("--param", f"root={run.directory.parent}"),
    )
    say(f"submitted {run.name} through Prefect: {RANKS[0]} ranks, {STEPS} steps")
    wait_for_flow(service, run)
    attempt = run.attempt(1)
    wait("a third of the steps", run, lambda: (step_of(run, 1) or 0) >= STEPS // 3)
    claim = read_document(Claim, attempt.claim)
    assert claim is not None, "a training attempt has a claim"
    say(f"step {step_of(run, 1)}: SIGTERM to the agent of node 0, as a preemption would")
    os.kill(claim.pid, signal.SIGTERM)
    wait("the relaunch", run, lambda: (step_of(run, 2) or 0) > 0)
    say(f"training again, on {RANKS[1]} ranks, at step {step_of(run, 2)}")
    wait("the end of the run", run, lambda: not load_history(run).state.is_live)
    ends_at = time.monotonic() + FLOW_END_S_MAX
    while is_supervised(run.flow_lock) and time.monotonic() < ends_at:
        time.sleep(POLL_S)


def wait_for_flow(service: PrefectService, run: RunPaths) -> None:
    """Wait until the flow has created the run. Raises `RuntimeError` if the flow fails before."""
    ends_at = time.monotonic() + FLOW_START_S_MAX
    while not run.spec.is_file():
        failure = service.find_failure()
        if failure:
            raise RuntimeError(f"the flow failed before it created the run: {failure}")
        if time.monotonic() > ends_at:
            raise RuntimeError(f"the flow has not created the run in {FLOW_START_S_MAX:.0f} s")
        time.sleep(POLL_S)


def step_of(run: RunPaths, attempt: int) -> int | None:
    """Return the last step that any rank of the attempt finished, from the heartbeats."""
    return newest_step(read_heartbeats(run.attempt(attempt)))


def wait(what: str, run: RunPaths, is_so: Callable[[], bool]) -> None:
    """Wait until `is_so()`. Raises `RuntimeError` if the run ends before, or after `RUN_S_MAX`."""
    ends_at = time.monotonic() + RUN_S_MAX
    last_key: object = None
    while time.monotonic() < ends_at:
        # Read before `is_so`, so that an end of the run that it has not seen is no failure.
        history = load_history(run)
        if is_so():
            return
        progress = describe_progress(history)
        if progress.key != last_key:
            say(progress.text)
        last_key = progress.key
        if not history.state.is_live:
            raise RuntimeError(f"the run ended before {what}: {progress.text}")
        time.sleep(POLL_S)
    raise RuntimeError(f"waited {RUN_S_MAX:.0f} s for {what}, without success")


def judge(service: PrefectService, run: RunPaths) -> list[str]:
    """Print a summary of the run in five lines. Return a line for each check that fails."""
    final = next(iter(reversed(run.list_checkpoints())), run.checkpoints)
    with ThreadPoolExecutor(2) as both:
        asked = both.submit(service.command, "holdfast", "show", run.name, "--json")
        verified = service.command("holdfast", "verify", str(final), "--json", check=False)
    shown: dict[str, Any] = json.loads(asked.result().stdout)
    checked: dict[str, Any] = json.loads(verified.stdout or "{}")
    broken = [what for what, holds in expectations(shown, checked) if not holds]
    if not broken:
        print_summary(shown, checked, run)
    return broken


def expectations(shown: dict[str, Any], checked: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each check of the finished run, and whether it passes."""
    attempts = shown["attempts"]
    if len(attempts) != len(RANKS):
        return [(f"expected two attempts, found {len(attempts)}", False)]
    first, second = attempts
    digests = {first["command_digest"], second["command_digest"]}
    return [
        ("the run completes", shown["state"] == "completed"),
        ("4 ranks, then 2", (first["world_size"], second["world_size"]) == RANKS),
        ("the first attempt is preempted", first["cause"] == Cause.PREEMPTION),
        ("the second attempt completes", second["state"] == "completed"),
        ("both attempts run the same command", len(digests) == 1 and None not in digests),
        ("a commit follows the signal", first["signal_to_commit_s"] is not None),
        ("no step is trained twice", second["first_step"] == first["last_step"] + 1),
        ("no step is lost", shown["goodput"]["steps_lost"] == 0),
        (f"all {STEPS} steps are trained", second["last_step"] == STEPS),
        ("the last checkpoint verifies", checked.get("ok") is True),
    ]


def print_summary(shown: dict[str, Any], checked: dict[str, Any], run: RunPaths) -> None:
    """Print five lines about the run, and commands that show more of it."""
    first, second = shown["attempts"]
    commit_s = seconds_text(first["signal_to_commit_s"])
    files = checked["files"]
    count = len(files) if isinstance(files, list) else files
    size = sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    names = ("HOLDFAST_HOME", "HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL")
    prefix = "".join(f"{name}={os.environ[name]} " for name in names if os.environ.get(name))
    program = Path(sys.executable).parent / "holdfast"
    ranks = second["world_size"]
    lines = (
        f"Preempted: {first['world_size']} ranks stopped together after step {first['last_step']}.",
        f"Saved: the final checkpoint was committed {commit_s} after the signal.",
        f"Resumed: {ranks} ranks ran the same command from step {second['first_step']}.",
        f"Completed: {second['last_step']} steps, none of them lost or trained twice.",
        f"Verified: {count} files of the last checkpoint; all checkpoints take {bytes_text(size)}.",
    )
    print()
    for number, line in enumerate(lines, 1):
        print(f"{number}. {line}")
    print(f"\nThe run stays in {run.directory}. Look at it:")
    for command in (f"show {run.name}", f"lineage {run.name}", "serve"):
        print(f"  {prefix}{program} {command}")
    print(flush=True)


def end_jobs(run: RunPaths) -> None:
    """Cancel the jobs of the run that still exist. After a successful run there are none."""
    for attempt in run.list_attempts():
        request = read_document(Request, attempt.request)
        submission = read_document(Submission, attempt.submission)
        if request and submission and not attempt.outcome.exists():
            executor_for(request.executor).cancel(request, submission)


def print_logs(folder: Path | None) -> None:
    """Print the ends of the server's and the worker's logs to standard error."""
    for path in sorted(folder.glob("*.log")) if folder else ():
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
