"""`make demo`: a run is preempted on four ranks and goes on with two, and nothing is lost.

A real Prefect server and process worker, a small GPT on this machine's cores, and a SIGTERM to
the node's agent, as Slurm's preemption would send it. Ends non-zero unless all of it is so.
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
from pathlib import Path
from typing import Any, Final

from demo_service import POOL, PrefectService

from holdfast.cli.output import print_table, seconds_text
from holdfast.cli.views import render_lineage
from holdfast.contracts.attempt import Claim, Request, Submission, read_document
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.states import Cause
from holdfast.flows.parameters import read_spec_file
from holdfast.flows.progress import describe_progress
from holdfast.workers.executors import executor_for
from holdfast.workers.heartbeats import newest_step, read_heartbeats

SPEC: Final = Path(__file__).parent / "gpt" / "spec.toml"
RUN_S_MAX: Final = 300.0
POLL_S: Final = 0.25
RANKS: Final = (4, 2)


def main() -> int:
    """Play the scenario; 0 when everything that should be so is so."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    environment = dict(os.environ)
    environment.setdefault("HOLDFAST_HOME", str(folder / "home"))
    home = Path(environment["HOLDFAST_HOME"]).expanduser().absolute()
    root = Path(environment.get("HOLDFAST_ROOT") or home / "runs").expanduser().absolute()
    environment |= {"HOLDFAST_HOME": str(home), "HOLDFAST_ROOT": str(root)}
    run = RunPaths(root / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    service = PrefectService(folder, environment)
    try:
        say(f"starting a Prefect server at {service.api}")
        with service.serving():
            prepare(service)
            with service.working():
                try:
                    play(service, run)
                finally:
                    end_jobs(run)
        broken = judge(service, run)
        print_logs(folder if broken else None)
    except RuntimeError as error:
        broken = [str(error)]
        print_logs(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in broken:
        print(f"NOT SO: {line}", file=sys.stderr)
    say(f"{'failed' if broken else 'done'} after {seconds_text(time.monotonic() - began)}")
    return 1 if broken else 0


def prepare(service: PrefectService) -> None:
    """Create the work pool and the deployment, as an operator would once."""
    service.command("prefect", "work-pool", "create", POOL, "--type", "process")
    service.command("holdfast", "deploy", "--pool", POOL)
    say("work pool and deployment train/holdfast are there")


def play(service: PrefectService, run: RunPaths) -> None:
    """Submit, preempt at a third of the steps, and wait until the run has ended."""
    steps = int(read_spec_file(SPEC)["config"]["steps"])
    overrides = [f"name={run.name}", "supervision.poll_s=1", "supervision.heartbeat_s=0.5"]
    service.command(
        *("prefect", "deployment", "run", "train/holdfast", "--param", f"spec={SPEC}"),
        *("--param", f"overrides={json.dumps(overrides)}"),
        *("--param", f"root={run.directory.parent}"),
    )
    say(f"submitted {run.name} through Prefect: {RANKS[0]} ranks, {steps} steps")
    attempt = run.attempt(1)
    wait("a third of the steps", run, lambda: (step_of(run, 1) or 0) >= steps // 3)
    claim = read_document(Claim, attempt.claim)
    assert claim is not None, "an attempt that trains has been claimed"
    say(f"step {step_of(run, 1)}: SIGTERM to the agent of node 0, as a preemption would")
    os.kill(claim.pid, signal.SIGTERM)
    wait("the relaunch", run, lambda: (step_of(run, 2) or 0) > 0)
    say(f"training again, on {RANKS[1]} ranks, at step {step_of(run, 2)}")
    wait("the end of the run", run, lambda: not load_history(run).state.is_live)


def step_of(run: RunPaths, attempt: int) -> int | None:
    """The last step that any rank of the attempt finished, by the heartbeats."""
    return newest_step(read_heartbeats(run.attempt(attempt)))


def wait(what: str, run: RunPaths, is_so: Callable[[], bool]) -> None:
    """Wait for a condition; `RuntimeError` when the run ends before it, or after `RUN_S_MAX`."""
    ends_at = time.monotonic() + RUN_S_MAX
    told: object = None
    while time.monotonic() < ends_at:
        if run.spec.is_file():
            if is_so():
                return
            history = load_history(run)
            progress = describe_progress(history)
            if progress.key != told:
                say(progress.text)
            told = progress.key
            if not history.state.is_live:
                raise RuntimeError(f"the run ended before {what}: {progress.text}")
        time.sleep(POLL_S)
    raise RuntimeError(f"{what} did not come within {RUN_S_MAX:.0f} s")


def judge(service: PrefectService, run: RunPaths) -> list[str]:
    """Print what came of it; returns a line for everything that is not as it should be."""
    shown = json.loads(service.command("holdfast", "show", str(run.directory), "--json").stdout)
    graph = service.command("holdfast", "lineage", str(run.directory), "--json").stdout
    attempts: list[dict[str, Any]] = shown["attempts"]
    print_table(
        ("attempt", "ranks", "steps", "state", "cause", "command", "signal to commit"),
        [
            (
                each["number"],
                each["world_size"],
                f"{each['first_step']}–{each['last_step']}",
                each["state"],
                each["cause"],
                str(each["command_digest"])[:12],
                seconds_text(each["signal_to_commit_s"]),
            )
            for each in attempts
        ],
    )
    lost = shown["goodput"]["steps_lost"]
    commit_s = attempts[0]["signal_to_commit_s"] if attempts else None
    print(f"steps lost: {lost}; from the signal to the commit: {seconds_text(commit_s)}\n")
    render_lineage(json.loads(graph))
    return [what for what, is_so in expectations(service, run, shown) if not is_so]


def expectations(
    service: PrefectService, run: RunPaths, shown: dict[str, Any]
) -> list[tuple[str, bool]]:
    """What must be so after the run, and whether it is."""
    attempts = shown["attempts"]
    if len(attempts) != len(RANKS):
        return [(f"two attempts, not {len(attempts)}", False)]
    first, second = attempts
    steps = int(read_spec_file(SPEC)["config"]["steps"])
    digests = {first["command_digest"], second["command_digest"]}
    final = next(iter(reversed(run.list_checkpoints())), run.checkpoints)
    verified = service.command("holdfast", "verify", str(final), "--json", check=False)
    return [
        ("the run is completed", shown["state"] == "completed"),
        ("4 ranks, then 2", (first["world_size"], second["world_size"]) == RANKS),
        ("the first attempt was preempted", first["cause"] == Cause.PREEMPTION),
        ("the second attempt completed", second["state"] == "completed"),
        ("the same command both times", len(digests) == 1 and None not in digests),
        ("a signal was followed by a commit", first["signal_to_commit_s"] is not None),
        ("no step was trained twice", second["first_step"] == first["last_step"] + 1),
        ("no step was lost", shown["goodput"]["steps_lost"] == 0),
        (f"all {steps} steps were trained", second["last_step"] == steps),
        ("the last checkpoint is whole", verified.returncode == 0),
    ]


def end_jobs(run: RunPaths) -> None:
    """End by force whatever job of the run still lives; there is none when all went well."""
    for attempt in run.list_attempts():
        request = read_document(Request, attempt.request)
        submission = read_document(Submission, attempt.submission)
        if request and submission and not attempt.outcome.exists():
            executor_for(request.executor).cancel(request, submission)


def print_logs(folder: Path | None) -> None:
    """The ends of the server's and the worker's logs, on standard error; of no folder, nothing."""
    for path in sorted(folder.glob("*.log")) if folder else ():
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def say(text: str) -> None:
    """A line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
