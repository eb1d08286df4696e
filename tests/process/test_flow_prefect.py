"""The train flow under a real Prefect server and process worker, with faults at each level."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    claim_of,
    state_of,
    step_of,
    submissions,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events, load_history


@pytest.fixture
def runs(prefect_service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(prefect_service, tmp_path)
    yield made
    made.end_all()


def flow_logs(runs: FlowRuns, flow_run: str) -> str:
    """The log messages of a flow run on the server."""
    lines = runs.ask("logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}, limit=200)
    return "\n".join(line["message"] for line in lines)


def wait_for_log(runs: FlowRuns, flow_run: str, text: str) -> None:
    """Wait for ``text``: Prefect sends logs in batches, the last one maybe after the state."""
    wait_for(f"{text!r} in the flow's log", lambda: text in flow_logs(runs, flow_run))


@pytest.mark.slow
def test_preempted_run_continues_at_another_size_and_completes(runs: FlowRuns) -> None:
    spec = runs.write_spec(
        "preempted", {"steps": 300, "sleep_s": 0.1}, elastic={"on_preemption": [1]}
    )
    paths = runs.type_run(spec)
    wait_for("step 15", lambda: step_of(paths) >= 15)
    os.kill(claim_of(paths).pid, signal.SIGTERM)
    wait_for("the job's end", paths.attempt(1).outcome.exists)
    runs.hurry()
    wait_for_end(paths)
    shown = runs.holdfast("show", "preempted")
    first, second = shown["attempts"]
    assert (first["cause"], first["world_size"]) == ("preemption", 2)
    assert (second["state"], second["world_size"]) == ("completed", 1)
    assert second["first_step"] == first["last_step"] + 1
    assert second["last_step"] == 300
    assert first["command_digest"] == second["command_digest"]
    assert shown["goodput"]["steps_lost"] == 0
    (taken,) = supervisions(paths)
    wait_for("Prefect's state", lambda: runs.flow_state(taken["flow_run"]) == "COMPLETED")


@pytest.mark.slow
def test_killed_flow_is_replaced_and_the_job_keeps_training(runs: FlowRuns) -> None:
    """A local job; slurm/test_main_job.py tests a killed flow by default."""
    spec = runs.write_spec("survivor", {"steps": 2400, "sleep_s": 0.1})
    paths = runs.deploy_run(spec)
    wait_for("step 5", lambda: step_of(paths) >= 5)
    (taken,) = supervisions(paths)
    os.kill(taken["pid"], signal.SIGKILL)
    before = step_of(paths)
    wait_for("more steps with no flow", lambda: step_of(paths) >= before + 5)
    runs.deploy_run(spec)
    wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2)
    assert state_of(paths) == "running"
    runs.hurry()
    wait_for_end(paths)
    shown = runs.holdfast("show", "survivor")
    (attempt,) = shown["attempts"]
    assert attempt["last_step"] == 2400
    assert len(attempt["launches"]) == 1
    assert submissions(paths) == 1


@pytest.mark.slow
def test_job_of_a_cancelled_flow_still_saves_and_ends_in_the_index(
    runs: FlowRuns,
) -> None:
    """A local job; slurm/test_main_job.py tests a cancelled flow by default."""
    # With steps of 5 s the job reaches the agreed step long after its flow has ended.
    paths = runs.deploy_run(runs.write_spec("cancelled", {"steps": 500, "sleep_s": 5.0}))
    wait_for("step 1", lambda: step_of(paths) >= 1)
    (taken,) = supervisions(paths)
    runs.service.command("prefect", "flow-run", "cancel", taken["flow_run"])
    wait_for("the request", lambda: paths.attempt(1).stop.exists())
    wait_for("the flow's end", lambda: not psutil.pid_exists(taken["pid"]))
    assert not paths.attempt(1).outcome.exists(), "the job should outlive its flow"
    wait_for("Prefect's state", lambda: runs.flow_state(taken["flow_run"]) == "CANCELLED")
    wait_for("the job's own end", paths.attempt(1).outcome.exists)
    shown = runs.holdfast("show", "cancelled")
    (attempt,) = shown["attempts"]
    assert shown["state"] == "cancelled"
    assert (attempt["state"], attempt["cause"]) == ("cancelled", "operator")
    assert attempt["committed_step"] == attempt["last_step"]
    asked = [e for e in load_events(paths) if e.kind is EventKind.OPERATOR_REQUEST]
    name = runs.ask(f"flow_runs/{taken['flow_run']}")["name"]
    by = f"prefect flow run {name}"
    assert [(e.data["action"], e.data["by"]) for e in asked] == [("cancel", by)]


@pytest.mark.more
def test_cli_cancel_ends_the_flow_as_cancelled(runs: FlowRuns) -> None:
    paths = runs.deploy_run(runs.write_spec("called-off", {"steps": 500, "sleep_s": 0.1}))
    wait_for("step 1", lambda: step_of(paths) >= 1)
    (taken,) = supervisions(paths)
    assert runs.holdfast("cancel", "called-off")["flow_run"] is None
    wait_for("Prefect's state", lambda: runs.flow_state(taken["flow_run"]) == "CANCELLED")
    assert runs.holdfast("show", "called-off")["state"] == "cancelled"
    assert len(load_history(paths).attempts) == 1


@pytest.mark.slow
def test_run_survives_a_worker_shutdown_and_the_next_flow_takes_over(runs: FlowRuns) -> None:
    spec = runs.write_spec("left-alone", {"steps": 2400, "sleep_s": 0.1})
    paths = runs.deploy_run(spec)
    wait_for("step 5", lambda: step_of(paths) >= 5)
    (taken,) = supervisions(paths)
    os.kill(taken["pid"], signal.SIGTERM)
    wait_for("the flow's end", lambda: not psutil.pid_exists(taken["pid"]))
    assert not paths.attempt(1).stop.exists()
    assert state_of(paths) == "running"
    runs.deploy_run(spec)
    wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2)
    runs.hurry()
    wait_for_end(paths)
    assert len(load_history(paths).attempts) == 1


@pytest.mark.more
def test_pause_resume_and_resize_keep_the_same_flow(runs: FlowRuns) -> None:
    spec = runs.write_spec(
        "resized", {"steps": 1200, "sleep_s": 0.1}, elastic={"min_gpus": 1, "max_gpus": 2}
    )
    paths = runs.root / "resized"
    answer = runs.holdfast("submit", str(spec))
    run = RunPaths(paths)
    runs.made.append(run)
    assert answer["created"] is True
    assert answer["flow_run"]
    wait_for("step 5", lambda: step_of(run) >= 5)
    assert runs.holdfast("pause", "resized")["action"] == "pause"
    wait_for_end(run, "paused")
    (taken,) = supervisions(run)
    wait_for("the end of the flow's process", lambda: not psutil.pid_exists(taken["pid"]))
    again = runs.holdfast("relaunch", "resized", "--gpus", "1")
    assert again["flow_run"] == taken["flow_run"], "Prefect resumes the flow run"
    wait_for("steps at one rank", lambda: step_of(run, 2) >= 1)
    assert runs.holdfast("relaunch", "resized", "--gpus", "2")["flow_run"] is None
    wait_for("steps at two ranks", lambda: step_of(run, 3) >= 1)
    runs.hurry()
    wait_for_end(run)
    sizes = [attempt["world_size"] for attempt in runs.holdfast("show", "resized")["attempts"]]
    assert sizes == [2, 1, 2]
    assert [one["flow_run"] for one in supervisions(run)] == [taken["flow_run"]] * 2
    assert runs.holdfast("show", "resized")["goodput"]["steps_lost"] == 0


@pytest.mark.slow
def test_failing_program_fails_the_flow_with_its_traceback(runs: FlowRuns) -> None:
    spec = runs.write_spec("failing", {"steps": 30, "sleep_s": 0.05, "fail_at": 12})
    done = runs.service.command("holdfast", "submit", str(spec), "--wait", "--json", check=False)
    run = RunPaths(runs.root / "failing")
    runs.made.append(run)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["state"] == "failed"
    shown = runs.holdfast("show", "failing")
    (attempt,) = shown["attempts"]
    assert (attempt["state"], attempt["cause"]) == ("failed", "user_error")
    assert "a bad batch at step 12" in attempt["traceback"]
    assert len(attempt["launches"]) == 1, "the program's own error is not tried again"
    told = runs.service.command("holdfast", "show", "failing").stdout
    assert "user_error" in told
    assert "a bad batch at step 12" in told
    (taken,) = supervisions(run)
    wait_for("Prefect's state", lambda: runs.flow_state(taken["flow_run"]) == "FAILED")
    wait_for_log(runs, taken["flow_run"], "a bad batch at step 12")
    again = runs.service.command("holdfast", "submit", str(spec), check=False)
    assert again.returncode == 5
    assert "holdfast relaunch failing" in again.stderr


@pytest.mark.more
def test_checks_that_were_skipped_are_made_by_the_flow(runs: FlowRuns) -> None:
    spec = runs.write_spec("unchecked", {}, command=["nothing.py"])
    refused = runs.service.command("holdfast", "submit", str(spec), check=False)
    assert (refused.returncode, "nothing.py" in refused.stderr) == (5, True)
    told = runs.holdfast("submit", str(spec), "--skip-preflight")
    paths = RunPaths(Path(told["directory"]))
    wait_for("the flow's end", lambda: runs.flow_state(told["flow_run"]) == "FAILED")
    wait_for_log(runs, told["flow_run"], "nothing.py is not a file")
    assert submissions(paths) == 0


@pytest.mark.slow
def test_prefect_deploy_makes_the_same_deployment(runs: FlowRuns) -> None:
    service = runs.service
    inspect = ("prefect", "deployment", "inspect", "train/holdfast", "--output", "json")
    before = json.loads(service.command(*inspect).stdout)
    template = Path(__file__).parents[2] / "prefect.yaml"
    service.command("prefect", "deploy", "--all", "--prefect-file", str(template))
    after = json.loads(service.command(*inspect).stdout)
    assert after["id"] == before["id"]
    for key in ("entrypoint", "work_pool_name", "pull_steps", "parameters", "name"):
        assert (after[key] or None) == (before[key] or None), key
    assert after["entrypoint"] == "holdfast.flows.train.train"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_continues_without_prefect_and_index_and_both_catch_up(
    tmp_path: Path,
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    database = tmp_path / "away" / "holdfast.db"
    database.parent.mkdir()
    environment |= {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_ROOT": str(tmp_path / "runs"),
        "HOLDFAST_DATABASE_URL": f"sqlite:///{database}",
        # Otherwise Prefect tries for four minutes to report the end of the flow.
        "PREFECT_CLIENT_MAX_RETRIES": "2",
    }
    service = PrefectService(tmp_path, environment)
    runs = FlowRuns(service, tmp_path)
    try:
        with contextlib.ExitStack() as server:
            server.enter_context(service.serving())
            service.command("holdfast", "deploy")
            with service.working():
                spec = runs.write_spec("alone", {"steps": 100, "sleep_s": 0.1})
                paths = runs.deploy_run(spec)
                wait_for("step 5", lambda: step_of(paths) >= 5)
                server.close()
                away = database.parent.rename(tmp_path / "elsewhere")
                database.parent.touch()
                os.kill(claim_of(paths).pid, signal.SIGTERM)
                wait_for_end(paths, wait_s=300)
                (taken,) = supervisions(paths)
                wait_for("the flow's end", lambda: not psutil.pid_exists(taken["pid"]), 300)
        assert submissions(paths) == 2
        database.parent.unlink()
        away.rename(database.parent)
        shown = runs.holdfast("show", "alone")
        assert shown["state"] == "completed"
        assert [attempt["cause"] for attempt in shown["attempts"]] == ["preemption", None]
        assert shown["goodput"]["steps_lost"] == 0
        with service.serving(), service.working():
            again = service.command("holdfast", "submit", str(spec), check=False)
        assert submissions(paths) == 2, again.stdout + again.stderr
    finally:
        runs.end_all()
