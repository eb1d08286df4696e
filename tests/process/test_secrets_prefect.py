"""Secrets under a real Prefect server: a block, the submitter's variable, Prefect's records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import FlowRuns, supervisions, wait_for, wait_for_end

from holdfast.contracts.disk.paths import RunPaths

PROGRAM: Final = Path(__file__).with_name("secrets_program.py")
BLOCK_VALUE: Final = "block-Tn6wQ1fG8zJe"
ENV_VALUE: Final = "env-Vb3kR7mX2pLa"
VARIABLE: Final = "TESTS_SUBMITTERS_TOKEN"
BLOCK: Final = "tests-token"
FILE_VALUE: Final = "file-Hc5nW9tY3sDq"
PLAIN_VALUE: Final = "plain-Rf8dK2vJ6mZx"


@pytest.fixture
def runs(prefect_service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(prefect_service, tmp_path)
    yield made
    made.end_all()
    prefect_service.environment.pop(VARIABLE, None)


@pytest.mark.more
def test_secrets_that_the_program_prints_do_not_reach_prefect(runs: FlowRuns) -> None:
    file = runs.folder / "token"
    file.write_text(FILE_VALUE)
    file.chmod(0o600)
    settings = {"names": [], "seen": str(runs.folder / "seen"), "fail": ["HF_TOKEN", "OTHER"]}
    spec = runs.write_spec(
        "talkative",
        {},
        command=[PROGRAM.name, json.dumps(settings)],
        resources={"gpus_per_node": 1},
        environment={"HF_TOKEN": PLAIN_VALUE, "OTHER": {"from_file": str(file)}},
    )
    done = runs.service.command("holdfast", "submit", str(spec), "--wait", "--json", check=False)
    paths = RunPaths(runs.root / "talkative")
    runs.made.append(paths)
    assert json.loads(done.stdout)["state"] == "failed"
    (taken,) = supervisions(paths)
    identity = taken["flow_run"]
    wait_for("Prefect's state", lambda: runs.flow_state(identity) == "FAILED")
    of_flow = {"flow_runs": {"id": {"any_": [identity]}}, "limit": 100}

    def logs() -> str:
        lines = runs.ask("logs/filter", logs={"flow_run_id": {"any_": [identity]}}, limit=200)
        return json.dumps(lines, ensure_ascii=False)

    wait_for("the traceback in the flow's log", lambda: "the first failing rank" in logs())
    flow = runs.ask(f"flow_runs/{identity}")
    assert "refused with •••, •••" in flow["state"]["message"]
    # The submitted spec is a parameter of the flow, unchanged.
    parameters = flow.pop("parameters")
    assert parameters["spec"]["environment"]["HF_TOKEN"] == PLAIN_VALUE
    said = [flow, runs.ask("task_runs/filter", **of_flow), done.stdout, done.stderr]
    states = runs.ask(f"flow_run_states/?flow_run_id={identity}")
    text = logs() + json.dumps([*said, states])
    assert [value for value in (PLAIN_VALUE, FILE_VALUE) if value in text] == []


@pytest.mark.more
def test_prefect_block_and_variable_secrets_reach_only_the_program(runs: FlowRuns) -> None:
    save = f"from prefect.blocks.system import Secret; Secret(value={BLOCK_VALUE!r}).save({BLOCK!r}"
    runs.service.command("python", "-c", f"{save}, overwrite=True)")
    seen = runs.folder / "seen"
    settings = {"names": ["BLOCK", "TOKEN"], "seen": str(seen)}
    spec = runs.write_spec(
        "blocked",
        {},
        command=[PROGRAM.name, json.dumps(settings)],
        resources={"gpus_per_node": 1},
        environment={"BLOCK": {"prefect_secret": BLOCK}, "TOKEN": {"from_env": VARIABLE}},
    )
    refused = runs.service.command("holdfast", "submit", str(spec), check=False)
    assert refused.returncode != 0
    assert f"the variable {VARIABLE} is not set here" in refused.stderr
    paths = RunPaths(runs.root / "blocked")
    assert not paths.directory.exists()
    # The worker was started earlier and does not have the variable.
    runs.service.environment[VARIABLE] = ENV_VALUE
    told = runs.service.command("holdfast", "submit", str(spec), "--json")
    runs.made.append(paths)
    wait_for_end(paths)
    wait_for("the record's end", lambda: not paths.private.exists())
    assert json.loads(seen.read_text()) == {
        "BLOCK": hashlib.sha256(BLOCK_VALUE.encode()).hexdigest(),
        "TOKEN": hashlib.sha256(ENV_VALUE.encode()).hexdigest(),
    }
    (taken,) = supervisions(paths)
    flow_run = runs.ask(f"flow_runs/{taken['flow_run']}")
    assert flow_run["parameters"]["spec"]["environment"]["BLOCK"] == {"prefect_secret": BLOCK}
    logs = runs.ask("logs/filter", logs={"flow_run_id": {"any_": [taken["flow_run"]]}}, limit=200)
    files = [p.read_bytes() for p in paths.directory.rglob("*") if p.is_file()]
    said = json.dumps([flow_run, logs, told.stdout, told.stderr])
    for value in (BLOCK_VALUE, ENV_VALUE):
        assert value not in said
        assert not any(value.encode() in content for content in files)
