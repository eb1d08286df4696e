"""The Prefect worker type `holdfast`: flows outlive it, and lost flows are started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from examples.demo_service import POOL, PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    service_environment,
    state_of,
    step_of,
    submissions,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events

# From the death of a supervisor until the next one has taken up the run: 15 s on an idle machine.
RESUMED_S_MAX = 45.0


@pytest.fixture
def server() -> Iterator[contextlib.ExitStack]:
    """The running server. To stop it, close the stack."""
    with contextlib.ExitStack() as parts:
        yield parts


@pytest.fixture
def service(tmp_path: Path, server: contextlib.ExitStack) -> PrefectService:
    """A server with a pool of the type `holdfast`. The test starts workers, and kills them."""
    made = PrefectService(tmp_path, service_environment(tmp_path))
    server.enter_context(made.serving())
    made.command("holdfast", "deploy", "--type", "holdfast")
    return made


@pytest.fixture
def runs(service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(service, tmp_path)
    yield made
    made.end_flows()
    made.end_all()


@contextlib.contextmanager
def worker(service: PrefectService, name: str = "worker") -> Iterator[subprocess.Popen[bytes]]:
    start = ("prefect", "worker", "start", "--pool", POOL, "--type", "holdfast", "--name", name)
    log = service.folder / f"{name}.log"
    seen = log.stat().st_size if log.exists() else 0
    with service.background(name, start) as process:
        wait_for("the worker", lambda: b"started!" in log.read_bytes()[seen:])
        yield process


def kill(pid: int) -> float:
    """Kill a process; return the time at which it was gone."""
    process = psutil.Process(pid)
    process.kill()
    with contextlib.suppress(psutil.TimeoutExpired):
        # The flow is a child of a worker, which reaps it.
        process.wait(5)
    return time.monotonic()


def has_reached(paths: RunPaths, attempt: int, step: int) -> bool:
    return step_of(paths, attempt) >= step


def wait_for_supervisor(paths: RunPaths, number: int, since: float) -> int:
    """Wait for the run's `number`-th supervisor; return its process id."""
    wait_for(f"supervisor {number}", lambda: len(supervisions(paths)) == number)
    took_s = time.monotonic() - since
    print(f"supervisor {number} after {took_s:.1f} s")
    assert took_s <= RESUMED_S_MAX
    return int(supervisions(paths)[-1]["pid"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flow_is_resumed_whatever_dies(
    runs: FlowRuns, service: PrefectService, server: contextlib.ExitStack
) -> None:
    log = service.folder / "worker.log"
    with contextlib.ExitStack() as workers:
        first = workers.enter_context(worker(service))
        paths = runs.deploy_run(runs.write_spec("kept", {"steps": 20000, "sleep_s": 0.1}))
        wait_for("step 5", lambda: step_of(paths) >= 5)
        (taken,) = supervisions(paths)

        killed_at = kill(taken["pid"])
        flow = wait_for_supervisor(paths, 2, killed_at)

        # As when its host shuts down. The flow then reports that it crashed.
        os.kill(flow, signal.SIGTERM)
        flow = wait_for_supervisor(paths, 3, time.monotonic())

        first.send_signal(signal.SIGKILL)
        first.wait()
        assert psutil.pid_exists(flow), "the flow outlives its worker"
        # The next worker starts before the server is there again.
        server.close()
        second = workers.enter_context(worker(service))
        wait_for("a server that is down", lambda: b"does not answer" in log.read_bytes())
        server.enter_context(service.serving())
        wait_for("the flow's new worker", lambda: b"found flow run" in log.read_bytes())
        killed_at = kill(flow)
        flow = wait_for_supervisor(paths, 4, killed_at)

        # As if the host of the worker and of its flow were lost: another one has no records.
        second.send_signal(signal.SIGKILL)
        second.wait()
        kill(flow)
        shutil.rmtree(service.folder / "home" / "flows")
        workers.enter_context(worker(service))
        flow = wait_for_supervisor(paths, 5, time.monotonic())

        flow_run = taken["flow_run"]
        assert {one["flow_run"] for one in supervisions(paths)} == {flow_run}
        assert submissions(paths) == 1, "training went on all the time"
        assert runs.ask(f"flow_runs/{flow_run}")["infrastructure_pid"].endswith(f":{flow}")
        service.command("prefect", "flow-run", "cancel", flow_run)
        wait_for_end(paths, "cancelled")
        wait_for("Prefect's state", lambda: runs.flow_state(flow_run) == "CANCELLED")
        assert "was lost" in log.read_text()
        wait_for("no records", lambda: not list((service.folder / "home" / "flows").iterdir()))


@pytest.mark.slow
def test_flow_run_that_is_resumed_gets_one_process(runs: FlowRuns, service: PrefectService) -> None:
    """The worker of the process that ended with the pause does not start it again."""
    with worker(service, "first"), worker(service, "second"):
        paths = runs.deploy_run(runs.write_spec("kept", {"steps": 20000, "sleep_s": 0.1}))
        wait_for("step 5", lambda: step_of(paths) >= 5)
        flow_run = supervisions(paths)[-1]["flow_run"]
        for attempt in (2, 3):
            runs.holdfast("pause", paths.name)
            wait_for("the pause", lambda: runs.flow_state(flow_run) == "PAUSED")
            runs.ask(f"flow_runs/{flow_run}/resume", run_input={})
            wait_for("the next attempt", partial(has_reached, paths, attempt, 5))
        # The last supervisor dies. Another process would have taken up the run at once.
        assert len(supervisions(paths)) == 3
        killed_at = kill(supervisions(paths)[-1]["pid"])
        wait_for_supervisor(paths, 4, killed_at)
        logs = [(service.folder / f"{name}.log").read_text() for name in ("first", "second")]
        assert sum(log.count("was lost") for log in logs) == 1
        service.command("prefect", "flow-run", "cancel", flow_run)
        wait_for_end(paths, "cancelled")


@pytest.mark.more
def test_cancel_of_a_suspended_flow_run_ends_the_paused_run(
    runs: FlowRuns, service: PrefectService
) -> None:
    """Prefect tells nobody of that, because the flow run has no process."""
    with worker(service):
        spec = runs.write_spec("held", {"steps": 20000, "sleep_s": 0.1})
        paths = runs.deploy_run(spec)
        wait_for("step 5", lambda: step_of(paths) >= 5)
        flow_run = supervisions(paths)[-1]["flow_run"]
        runs.holdfast("pause", paths.name)
        wait_for("the pause", lambda: runs.flow_state(flow_run) == "PAUSED")
        # A paused run needs nobody, and starting a supervisor is no order to continue.
        (said,) = runs.holdfast("supervise", paths.name)
        assert (said["state"], said["started"], said.get("flow_run")) == ("paused", False, None)
        assert runs.holdfast("submit", str(spec))["flow_run"] is None
        assert runs.flow_state(flow_run) == "PAUSED"
        service.command("prefect", "flow-run", "cancel", flow_run)
        wait_for("the end of the run", lambda: state_of(paths) == "cancelled", 60)
        asked = [one.data for one in load_events(paths) if one.kind is EventKind.OPERATOR_REQUEST]
        name = runs.ask(f"flow_runs/{flow_run}")["name"]
        assert asked[-1]["by"] == f"prefect flow run {name}"


@pytest.mark.more
def test_flow_that_cannot_start_is_reported(runs: FlowRuns, service: PrefectService) -> None:
    with worker(service):
        deployment = runs.ask("deployments/name/train/holdfast")["id"]
        made = runs.ask(
            f"deployments/{deployment}/create_flow_run", parameters={"spec": "/no/such/spec.toml"}
        )
        wait_for("Prefect's state", lambda: runs.flow_state(made["id"]) == "FAILED")
        flows = service.folder / "home" / "flows"
        wait_for("the end of its record", lambda: not (flows / f"{made['id']}.json").exists())
        assert "/no/such/spec.toml" in (flows / f"{made['id']}.log").read_text()
        assert "/no/such/spec.toml" in runs.ask(f"flow_runs/{made['id']}")["state"]["message"]
