"""Three runs share a quota for half an hour, while everything around them is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from examples.demo_service import PrefectService
from slurm_cluster import SlurmCluster
from tests.slurm.operations import (
    EFFECT_S,
    GPUS_PER_RUN,
    Operations,
    Quota,
    Surroundings,
    exported_weights,
)
from tests.support.flow_runs import (
    PROGRAM,
    FlowRuns,
    events_of,
    expected_events,
    service_environment,
    state_of,
    submissions,
    supervisions,
    wait_for,
)

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history

SEED: Final = 20261124
# A shorter soak finds a mistake in this test sooner.
SOAK_S: Final = float(os.environ.get("HOLDFAST_TEST_SOAK_S", "1800"))
END_S: Final = 900.0
GPUS: Final = 2 * GPUS_PER_RUN
NAME: Final = "soak"
VARIANTS: Final = ("a", "b", "c")
# With these steps, a run cannot end before the soak does.
SETTINGS: Final = {"steps": 20_000, "sleep_s": 0.1, "noise": 0.1}
FINAL: Final = {"COMPLETED", "CANCELLED", "FAILED", "CRASHED"}


@pytest.fixture
def service(slurm: SlurmCluster, tmp_path: Path) -> PrefectService:
    """A service whose parts end with SIGKILL, as when their host is lost."""
    return PrefectService(tmp_path, {**service_environment(tmp_path), **slurm.env}, end_s=0.0)


@pytest.fixture
def surroundings(service: PrefectService) -> Iterator[Surroundings]:
    made = Surroundings(service)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def runs(service: PrefectService, tmp_path: Path, surroundings: Surroundings) -> Iterator[FlowRuns]:
    made = FlowRuns(service, tmp_path)
    yield made
    made.end_flows()
    made.end_all()


def start_sweep(runs: FlowRuns) -> str:
    """Start the three runs under their quota, and return the sweep's flow run."""
    resources: dict[str, Any] = {"executor": "slurm", "nodes": 1, "gpus_per_node": GPUS_PER_RUN}
    resources["partition"] = "spot"
    spec = runs.write_spec(NAME, SETTINGS, resources=resources, checkpoint={"interval": 200})
    deployment = runs.ask("deployments/name/sweep/holdfast")["id"]
    variants = {key: [f"environment.VARIANT={key}"] for key in VARIANTS}
    parameters = {"spec": json.loads(spec.read_text()), "variants": variants, "gpus": GPUS}
    made = runs.ask(f"deployments/{deployment}/create_flow_run", parameters=parameters)
    return str(made["id"])


def reference_weights(runs: FlowRuns, folder: Path) -> dict[str, bytes]:
    """The weights of a run that nothing interrupts, started with torchrun."""
    settings = {**SETTINGS, "sleep_s": 0.0}
    environment = {**os.environ, "HOLDFAST_ROOT": str(folder), "OMP_NUM_THREADS": "1"}
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node=2", str(PROGRAM), json.dumps(settings)]
    subprocess.run(command, env=environment, check=True, timeout=END_S, capture_output=True)
    newest = (folder / PROGRAM.stem / "checkpoints" / "latest").resolve()
    return exported_weights(runs, str(newest), folder / "reference.safetensors")


def has_all_events(runs: FlowRuns, paths: RunPaths) -> bool:
    """True once the server has as many events as the journal has lines for it."""
    return len(events_of(runs, paths)) >= len(expected_events(paths))


def check_agreement(slurm: SlurmCluster, runs: FlowRuns, paths: RunPaths) -> None:
    """Holdfast, Prefect and Slurm agree on how the run and each of its jobs ended."""
    history = load_history(paths)
    assert history.state.value == "completed"
    assert all(one.state.is_terminal for one in history.attempts)
    flow_runs = dict.fromkeys(one["flow_run"] for one in supervisions(paths))
    states = {one: runs.flow_state(one) for one in flow_runs}
    assert set(states.values()) <= FINAL, states
    assert states[supervisions(paths)[-1]["flow_run"]] == "COMPLETED", states
    fields = ("--starttime", "now-1days", "--format", "JobID,JobName,State")
    lines = slurm.run("sacct", "-X", "-n", "-P", *fields).splitlines()
    jobs = [line.split("|") for line in lines if f"holdfast-{paths.name}-" in line]
    assert len(jobs) == submissions(paths) == len(history.attempts)
    assert not [one for one in jobs if one[2] in {"RUNNING", "PENDING"}]


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 2 * END_S)
def test_runs_under_a_quota_survive_half_an_hour_of_operations(
    slurm: SlurmCluster,
    runs: FlowRuns,
    surroundings: Surroundings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    members = [RunPaths(runs.root / f"{NAME}-{key}") for key in VARIANTS]
    runs.made += members
    sweep = start_sweep(runs)
    quota = Quota(slurm, f"holdfast-{NAME}-")
    operations = Operations(slurm, runs, surroundings, members, SEED)
    ends_at = time.monotonic() + SOAK_S
    try:
        while time.monotonic() < ends_at:
            operations.next()
            operations.continue_ended()
        runs.hurry()
        wait_for("the end of all runs", operations.continue_ended, END_S)
    finally:
        most = quota.close()
        with capsys.disabled():
            print(f"\n{operations.report()}")
    assert most == GPUS, "two runs at a time, and never three"
    assert len(operations.done) >= SOAK_S / 60, "the operations take less than a minute each"
    check_end(slurm, runs, members, sweep, tmp_path)


def check_end(
    slurm: SlurmCluster, runs: FlowRuns, members: list[RunPaths], sweep: str, folder: Path
) -> None:
    """All runs are complete with the right weights, and everybody agrees on it."""
    if runs.flow_state(sweep) != "COMPLETED":
        # It had ended while a run was cancelled. Started again, it finds all runs complete.
        wait_for("the sweep's end", lambda: runs.flow_state(sweep) in FINAL, EFFECT_S)
        runs.service.command("prefect", "flow-run", "retry", sweep)
        wait_for("the sweep", lambda: runs.flow_state(sweep) == "COMPLETED", EFFECT_S)
    right = reference_weights(runs, folder / "reference")
    for paths in members:
        assert state_of(paths) == "completed"
        shown: dict[str, Any] = runs.holdfast("show", paths.name)
        assert shown["step"] == SETTINGS["steps"]
        wait_for("all events", partial(has_all_events, runs, paths), EFFECT_S)
        told = [(one["event"], one["payload"]["time"]) for one in events_of(runs, paths)]
        assert told == expected_events(paths), f"{paths.name}: each line once, in order"
        # An export adds a line to the journal, and the run has no supervisor any more.
        newest = f"{paths.name}:{(paths.checkpoints / 'latest').resolve().name}"
        output = folder / f"{paths.name}.safetensors"
        assert exported_weights(runs, newest, output) == right, paths.name
        check_agreement(slurm, runs, paths)
