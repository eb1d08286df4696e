"""The deployments of `holdfast deploy`, used by `prefect deployment run` and the API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples.demo_service import PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    state_of,
    step_of,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events, load_history
from holdfast.flows.deploying import FLOWS

REPOSITORY = Path(__file__).parents[2]


def start(service: PrefectService, name: str, **parameters: Any) -> subprocess.Popen[str]:
    """Run a deployment with the command, and wait for the flow run's end in the background."""
    words = [f"--param={key}={json.dumps(value)}" for key, value in parameters.items()]
    return subprocess.Popen(
        [
            str(Path(sys.executable).parent / "prefect"),
            "deployment",
            "run",
            f"{name}/holdfast",
            "--watch",
            *words,
        ],
        env=service.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(command: subprocess.Popen[str]) -> str:
    """The last line that the command printed. Its exit status says if the flow completed."""
    output, _ = command.communicate(timeout=240)
    state = "Completed" if command.returncode == 0 else "not completed"
    return f"{state}: {output}"


def flow_run(runs: FlowRuns, name: str) -> dict[str, Any]:
    """The newest flow run of the flow."""
    found = runs.ask(
        "flow_runs/filter", flows={"name": {"any_": [name]}}, sort="EXPECTED_START_TIME_DESC"
    )
    newest: dict[str, Any] = found[0]
    return newest


@pytest.mark.more
def test_a_second_deploy_changes_nothing_and_prefect_yaml_deploys_the_same(
    runs: FlowRuns, service: PrefectService
) -> None:
    def deployed() -> dict[str, Any]:
        found = runs.ask("deployments/filter", limit=50)
        keys = ("id", "entrypoint", "description", "parameter_openapi_schema")
        return {one["entrypoint"].rpartition(".")[2]: [one[key] for key in keys] for one in found}

    before = deployed()
    assert sorted(before) == sorted(flow.name for flow in FLOWS)
    said = runs.holdfast("deploy")
    assert said["deployments"] == [f"{flow.name}/holdfast" for flow in FLOWS]
    assert deployed() == before
    listed = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    wanted = {one["entrypoint"]: one["description"] for one in listed}
    assert wanted == {entrypoint: text for _, entrypoint, text, _ in before.values()}


@pytest.mark.more
def test_wrong_parameters_are_refused_with_their_place_before_anything_is_queued(
    runs: FlowRuns, service: PrefectService
) -> None:
    spec = json.loads(runs.write_spec("wrong", {}).read_text())
    spec["resources"]["gpus_per_node"] = "many"
    spec["chekpoint"] = {}
    done = service.command(
        "prefect", "deployment", "run", "train/holdfast", f"--param=spec={json.dumps(spec)}",
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    answer = " ".join((done.stdout + done.stderr).split())
    assert "spec.resources.gpus_per_node" in answer
    deployment = runs.ask("deployments/name/train/holdfast")
    schema = deployment["parameter_openapi_schema"]
    checked = runs.ask(
        "ui/schemas/validate", schema=schema, values={"spec": spec, "preflight": "perhaps"}
    )
    assert not checked["valid"]
    assert {"spec", "preflight"} <= {one.get("property") for one in checked["errors"]}
    resources = schema["definitions"]["Resources"]["properties"]
    assert resources["gpus_per_node"]["description"]
    assert schema["properties"]["overrides"]["description"].startswith("Keys of the spec")
    assert not (runs.root / "wrong").exists()


@pytest.mark.slow
def test_operators_deployments_do_what_their_commands_do(
    runs: FlowRuns, service: PrefectService, tmp_path: Path
) -> None:
    spec = json.loads(runs.write_spec("work", {"steps": 2000, "sleep_s": 0.1}).read_text())
    trains = start(service, "train", spec=spec)
    paths = RunPaths(runs.root / "work")
    runs.made.append(paths)
    wait_for("step 15", lambda: paths.spec.is_file() and step_of(paths) >= 15)
    drill = start(service, "drill", run="work", count=1, kinds=["kill-rank"])
    assert end_of(drill).startswith("Completed")
    assert any(e.kind is EventKind.LAUNCH_ENDED for e in load_events(paths))
    wait_for("a live run again", lambda: state_of(paths) == "running")
    relaunch = start(service, "relaunch", run="work", gpus=1)
    wait_for("attempt 2", lambda: len(paths.list_attempts()) == 2 and step_of(paths, 2) > 0)
    assert load_history(paths).attempts[1].gpus == 1
    runs.hurry()
    wait_for_end(paths)
    # The second flow only followed: one supervisor acts at a time.
    assert end_of(trains).startswith("Completed")
    assert end_of(relaunch).startswith("Completed")
    assert len({one["flow_run"] for one in supervisions(paths)}) == 1
    output = tmp_path / "weights.safetensors"
    waited = [
        start(service, "verify", run="work"),
        start(service, "export", run="work", output=str(output)),
        start(service, "prune", run="work", dry_run=True),
    ]
    assert all(end_of(one).startswith("Completed") for one in waited)
    assert output.stat().st_size > 0
    kinds = [e.kind for e in load_events(paths)]
    assert EventKind.VERIFIED in kinds
    assert EventKind.EXPORTED in kinds
    assert EventKind.CHECKPOINT_DELETED not in kinds


@pytest.mark.slow
def test_a_damaged_checkpoint_and_an_unknown_run_fail_the_flow(
    runs: FlowRuns, service: PrefectService
) -> None:
    paths = runs.deploy_run(runs.write_spec("short", {"steps": 20, "sleep_s": 0.0}))
    wait_for_end(paths)
    newest = paths.list_checkpoints()[-1]
    victim = max(newest.rglob("*.distcp"), key=lambda one: one.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 0xFF
    victim.write_bytes(content)
    damaged, unknown = start(service, "verify", run="short"), start(service, "verify", run="shrt")
    assert end_of(damaged).startswith("not completed")
    assert end_of(unknown).startswith("not completed")
    ended = runs.ask("flow_runs/filter", flows={"name": {"any_": ["verify"]}})
    messages = [one["state"]["message"] or "" for one in ended]
    assert any(victim.name in one for one in messages)
    assert any("did you mean short?" in one for one in messages)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_completes_all_runs_and_never_holds_more_than_its_quota(
    runs: FlowRuns, service: PrefectService
) -> None:
    spec = json.loads(runs.write_spec("many", {"steps": 60, "sleep_s": 0.05}).read_text())
    variants = {f"v{number}": [f"environment.SEED={number}"] for number in range(3)}
    refused = start(service, "sweep", spec=spec, variants=variants, gpus=1)
    assert end_of(refused).startswith("not completed")
    assert "the run can hold 2 GPUs" in flow_run(runs, "sweep")["state"]["message"]
    members = [RunPaths(runs.root / f"many-{key}") for key in variants]
    assert not any(one.directory.exists() for one in members)
    runs.made += members
    sweep = start(service, "sweep", spec=spec, variants=variants, gpus=4)
    assert end_of(sweep).startswith("Completed")
    lines = []
    for paths in members:
        history = load_history(paths)
        assert history.state.value == "completed"
        assert history.record.spec["environment"]["SEED"] in {"0", "1", "2"}
        (attempt,) = history.attempts
        assert attempt.submitted_at is not None
        assert attempt.ended_at is not None
        lines += [(attempt.submitted_at, 2), (attempt.ended_at, -2)]
    held = [sum(change for _, change in sorted(lines)[: n + 1]) for n in range(len(lines))]
    assert max(held) == 4, "two at a time, and not all three"
